"""The contract every backend module fulfils. These modules are the only ones that import a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np

Tensor = Any  # a tensor of the backend
Where = Any  # a contiguous range, or what `index` returned
Axes = Sequence[tuple[int, Where]]  # where along some axes, not empty


class ProductCosts(NamedTuple):
    """The time for an element of a^T b, where in the whole product each takes one unit."""

    sampled: float  # when computed by itself
    block: float  # in a block
    gathered: float  # in a block, in addition and to be divided by its side: gathering the block's operands


class Link(Protocol):
    """Keeps a base variable and its part in step, for as long as it is open.

    On TensorFlow and PyTorch the base variable itself holds the merged values: whoever reads it has them, and only the
    gradient has to be led to the part. On JAX, where a value is what a function is given, the values are merged when
    they are read, and the base is written at the end.
    """

    base_is_current: bool  # whether the base variable itself holds the merged values while it is open
    differentiable_reads: bool  # whether a rule that gives the part its gradient reads the base with its history

    def holds_merged(self) -> bool:
        """Whether the base holds the merged values here and now. Writes them first where that is still to be done."""

    def alias(self, value: Tensor) -> Tensor:
        """The value, which was read of a base that holds the merged values, with a gradient for the part alone."""

    def sync(self) -> None:
        """Bring the base up to date, also after a write that went unnoticed, where it holds the merged values."""

    def base_assigned(self, value: Tensor) -> None:
        """Let the part follow: the base has been assigned this value."""

    def opened(self) -> AbstractContextManager[Any]:
        """Context manager: an assignment to one of the two is written to the other."""


class Backend(Protocol):
    """What finetooth needs of a backend beyond `keras.ops`."""

    def index(self, indices: np.ndarray, length: int) -> Any:
        """Sorted unique indices along an axis of this length, ready for `take` and `put`."""

    def coordinates(self, arrays: tuple[np.ndarray, ...]) -> Any:
        """Points, one index array per axis, ready for `take_points` and `put_points`."""

    def take(self, value: Tensor, axis: int, where: Where) -> Tensor:
        """The entries of `value` at `where` along an axis."""

    def put(self, value: Tensor, axes: Axes, part: Tensor) -> Tensor:
        """`value` with the grid of these axes replaced by `part`; its gradient is `take` of the result's, by axis."""

    def take_points(self, value: Tensor, coordinates: Any) -> Tensor:
        """The elements of `value` at the points."""

    def put_points(self, value: Tensor, coordinates: Any, part: Tensor) -> Tensor:
        """`value` with the elements at the points replaced; the gradient for `part` is `take_points` of its."""

    def matmul(self, a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
        """The product, of two matrices where one is transposed."""

    def einsum(self, equation: str, a: Tensor, b: Tensor) -> Tensor:
        """The sum of products that the equation writes."""

    def as_matrix(self, value: Tensor) -> Tensor:
        """All axes but the last as one."""

    def contract(self, operation: Any, x: Tensor, kernel: Tensor, part: Tensor) -> Tensor:
        """`operation.forward(x, kernel)`, with a gradient for x, and for the part that the kernel is merged with.

        The part's is `operation.gradient_part(operation.keep(x), dy)`, cast; the kernel as such gets none. For x it is
        `operation.gradient_x(dy, kernel, x)`, or what the backend knows by itself. Of this x, only shape and dtype
        may be used.
        """

    def pull_back(self, function: Any, at: Tensor, dy: Tensor) -> Tensor:
        """The gradient for the argument of a linear function; of `at`, only shape and dtype matter."""

    def product_costs(self) -> ProductCosts:
        """What parts of a matrix product cost on the device in use, as measured by `benchmarks/calibrate.py`."""

    def alignment(self) -> int:
        """The number of elements that a slice of a matrix should be a multiple of, to be multiplied at full speed."""

    def samples(self, shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> Any:
        """Points of a matrix of this shape, sorted, ready for `sampled_product`."""

    def sampled_product(self, samples: Any, a: Tensor, b: Tensor) -> Tensor:
        """The elements of a^T b at the points."""

    def look_up(self, rows: Any, tokens: Tensor, table: Tensor, part: Any) -> Tensor:
        """The table's rows for the tokens, the part's where a row is selected, with a gradient for the part alone."""

    def Link(self, part: Any) -> Link:
        """What keeps the base of a part and its variable in step."""

    def stepping(self, optimizer: Any, links: Sequence[Any]) -> AbstractContextManager[Any]:
        """Context manager: after the optimizer's steps the bases hold the merged values, at no cost of their size."""

    def is_variable(self, value: Any) -> bool:
        """Whether it is a variable, parameter or array of the backend itself."""

    def is_array(self, value: Any) -> bool:
        """Whether it is an array, which cannot be written."""

    def read(self, variable: Any, place: Any) -> Tensor:
        """The elements of a variable, of the backend's own or Keras', at a place: a tensor that stays as it is."""

    def write(self, variable: Any, place: Any, compact: Tensor) -> Any:
        """Write the elements of a variable at a place, in place where that is possible, and return the variable.

        An array is not changed; a new one is returned.
        """

    def trainable_like(self, variable: Any, value: Tensor, name: str) -> Any:
        """A trainable variable with this value, of the backend's own kind if the given one is."""

    def outside_of_graphs(self) -> AbstractContextManager[Any]:
        """Where variables can be made while a function is traced."""

    def aside(self) -> AbstractContextManager[Any]:
        """While open, no gradients are recorded where that is up to us, and the backend's own seeds do not move."""

    def sparse_rows(self, gradient: Any) -> tuple[Tensor, Tensor] | None:
        """The row numbers and rows of a sparse gradient, in which rows may repeat; None for a dense one."""

    def scaled(self, gradient: Any, scale: Tensor) -> Any:
        """A gradient, dense or sparse, times a number."""

    def distinct_rows(self, indices: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The rows of a sparse gradient each once, those that repeat summed.

        Where shapes must be known there are as many as were given, and those too many have the number `count`.
        """

    def read_rows(self, variable: Any, rows: Tensor) -> Tensor:
        """Rows of a variable. One of number `count` may be anything."""

    def write_rows(self, variable: Any, rows: Tensor, values: Tensor) -> None:
        """Write rows of a variable in place, and leave out those of number `count`."""

    def record(self, function: Callable[[], tuple[Tensor, Any]], sources: Sequence[Any]) -> Any:
        """Run a function that returns a loss and more. Returns both, and what gives the loss's gradients.

        That is a function of some positions in `sources`, each a Keras variable or one of the backend's own, and can be
        called again. A gradient is None where the loss does not depend on the source, or zero.
        """

    def known(self, condition: Tensor) -> bool | None:
        """The truth of a scalar; None while a function is traced, when nobody knows it."""

    def of_one_mind(self) -> bool:
        """Whether a step goes one way. Replicas may disagree, and would not meet where they exchange gradients."""

    def branch(self, condition: Tensor, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """What the one function returns if the condition holds, else what the other does, with gradients.

        Where compiled functions have no side effects, neither assigns anything.
        """

    def either(
        self, condition: Tensor, yes: Callable[[], Any], no: Callable[[], Any], variables: Sequence[keras.Variable]
    ) -> None:
        """Do one thing if the condition holds, else another; both assign to these variables and no others."""

    def where_open(self, gradient: Any, mask: Tensor) -> Any:
        """A gradient, dense or sparse, with exact zeros where the mask, which it is broadcast to, is false."""

    def creation_scope(self, model: keras.Model) -> AbstractContextManager[Any]:
        """Where variables that belong to the model must be created."""

    def without_gradients(self, variables: Sequence[keras.Variable]) -> AbstractContextManager[Any]:
        """Context manager: the variables hold no gradients of an earlier backward pass (torch only)."""

    def foreign_reads(self, layer: keras.Layer) -> AbstractContextManager[Any]:
        """While open, code that reads the layer's weights past Keras (a torch module) sees their Keras values."""

    def listing(self, layer: keras.Layer, variables: list[keras.Variable]) -> AbstractContextManager[Any]:
        """While open, the backend's own list of the layer's parameters, where it has one, holds these variables too."""

    def guarded(self, model: keras.Model, function: Any) -> Any:
        """The compiled step function, made to lose no weights when it fails."""


# What `keras.ops` does well enough; traced backends run these once.


def matmul(a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    """The product, of two matrices where one is transposed."""
    a, b = (keras.ops.transpose(x) if turned else x for x, turned in ((a, transpose_a), (b, transpose_b)))
    return keras.ops.matmul(a, b)


def branch(condition: Tensor, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """What the one function returns if the condition holds, else what the other does, with gradients."""
    return keras.ops.cond(condition, yes, no)


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """The sum of products that the equation writes."""
    return keras.ops.einsum(equation, a, b)


def as_matrix(value: Tensor) -> Tensor:
    """All axes but the last as one."""
    return keras.ops.reshape(value, (-1, keras.ops.shape(value)[-1]))
