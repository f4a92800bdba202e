"""The contract every backend module fulfils. These modules are the only ones that import a backend."""

from __future__ import annotations

from collections.abc import Sequence
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

    def write_live(self, part: Any) -> bool:
        """Where the base variable can be written in place for free, write the part into it; else do nothing."""

    def creation_scope(self, model: keras.Model) -> AbstractContextManager[Any]:
        """Where variables that belong to the model must be created."""

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


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """The sum of products that the equation writes."""
    return keras.ops.einsum(equation, a, b)


def as_matrix(value: Tensor) -> Tensor:
    """All axes but the last as one."""
    return keras.ops.reshape(value, (-1, value.shape[-1]))
