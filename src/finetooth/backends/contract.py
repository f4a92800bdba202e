"""The contract that the package of each backend fulfils. Only these packages import a backend.

Five protocols, and in each package a file for each of them: `Tensors`, `Variables`, `Gradients`, `Control`, `Training`.
What a function does is documented here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import keras
import numpy as np

if TYPE_CHECKING:
    from .tensor_region import TensorRegion

Tensor: TypeAlias = Any  # a tensor of the backend
Gradient: TypeAlias = Any  # a tensor of the backend, or what it has for a sparse gradient
Variable: TypeAlias = Any  # a Keras variable, or a variable, parameter or array of the backend
AxisIndex: TypeAlias = Any  # a contiguous range, or what `Tensors.index` returned
Coordinates: TypeAlias = Any  # what `Tensors.coordinates` returned
Samples: TypeAlias = Any  # what `Tensors.samples` returned
Axes: TypeAlias = Sequence[tuple[int, AxisIndex]]  # where along some axes, not empty
T = TypeVar("T")


class ProductCosts(NamedTuple):
    """The time for an element of a^T b, where in the whole product each takes one unit."""

    sampled: float  # when computed by itself
    block: float  # in a block
    gathered: float  # in a block, in addition and to be divided by its side: gathering the block's operands


class LinkedPart(Protocol):
    """The part of a base variable, as a backend sees it: `parts.trainable.TrainablePart`."""

    base: keras.Variable
    variable: keras.Variable
    tensor_region: TensorRegion
    link: Link

    def load(self, base_value: Tensor) -> None:
        """Set the part's variable to its region of a value that the base has been assigned."""


class RowSlots(Protocol):
    """The selected rows of an embedding table: `layer_rules.embedding.Rows`."""

    count: int

    def slots(self, tokens: Tensor) -> Tensor:
        """Return the part's row for each token; -1 where the token's row is frozen."""


class Operation(Protocol):
    """A product of an input and a kernel: forward, and its gradients for the input and for a part of the kernel."""

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Return the outputs."""

    def keep(self, x: Tensor) -> Tensor:
        """Return what the gradient for the part needs of the input."""

    def gradient_part(self, kept: Tensor, dy: Tensor) -> Tensor:
        """Return the gradient for the part, given what `keep` returned."""

    def gradient_x(self, dy: Tensor, kernel: Tensor, x: Tensor) -> Tensor:
        """Return the gradient for the input, of which only shape and dtype may be used."""


class Link(Protocol):
    """Keeps a base variable and its part in step while it is open.

    On TensorFlow and PyTorch the base variable itself holds the merged values: every reader has them, and only the
    gradient has to be led to the part. On JAX, where a value is what a function is given, the values are merged when
    they are read, and the base is written at the end.
    """

    base_is_current: bool  # whether the base variable itself holds the merged values while it is open
    differentiable_reads: bool  # whether a rule that gives the part its gradient reads the base with its history

    def holds_merged(self) -> bool:
        """Return whether the base holds the merged values here and now. Writes them first where that is still due."""

    def alias(self, value: Tensor) -> Tensor:
        """Return the value, read from a base that holds the merged values, with a gradient for the part alone."""

    def write_base(self) -> None:
        """Write the part into the base, where it holds the merged values."""

    def sync(self) -> None:
        """Bring the base up to date, also after a write that went unnoticed, where it holds the merged values."""

    def base_assigned(self, value: Tensor) -> None:
        """Let the part follow: the base has been assigned this value."""

    def opened(self) -> AbstractContextManager[None]:
        """Context manager: an assignment to one of the two is written to the other."""


class Tensors(Protocol):
    """Elements of tensors, and products of matrices."""

    def index(self, indices: np.ndarray, length: int) -> AxisIndex:
        """Return sorted unique indices along an axis of this length, ready for `take` and `put`."""

    def coordinates(self, arrays: tuple[np.ndarray, ...]) -> Coordinates:
        """Return points, given as one index array per axis, ready for `take_points` and `put_points`."""

    def take(self, value: Tensor, axis: int, where: AxisIndex) -> Tensor:
        """Return the entries of `value` at `where` along an axis."""

    def put(self, value: Tensor, axes: Axes, part: Tensor) -> Tensor:
        """Return `value` with the grid of these axes replaced by `part`.

        The gradient for the part is `take` of the result's, axis by axis.
        """

    def take_points(self, value: Tensor, coordinates: Coordinates) -> Tensor:
        """Return the elements of `value` at the points."""

    def put_points(self, value: Tensor, coordinates: Coordinates, part: Tensor) -> Tensor:
        """Return `value` with the elements at the points replaced.

        The gradient for the part is `take_points` of the result's.
        """

    def matmul(self, a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
        """Return the product of two matrices, of which one may be transposed."""

    def einsum(self, equation: str, a: Tensor, b: Tensor) -> Tensor:
        """Return the sum of products that the equation writes."""

    def as_matrix(self, value: Tensor) -> Tensor:
        """Return the value with all axes but the last as one."""

    def samples(self, shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> Samples:
        """Return sorted points of a matrix of this shape, ready for `sampled_product`."""

    def sampled_product(self, samples: Samples, a: Tensor, b: Tensor) -> Tensor:
        """Return the elements of a^T b at the points."""

    def product_costs(self) -> ProductCosts:
        """Return the costs of parts of a matrix product on the device in use (measured: `benchmarks/calibrate.py`)."""

    def alignment(self) -> int:
        """Return the number of elements that a slice should be a multiple of to be multiplied at full speed."""

    def is_dense(self, value: Any) -> bool:
        """Return False for a sparse, ragged or nested tensor, True for any other value."""


class Variables(Protocol):
    """Reads and writes of variables: those of Keras, and the backend's own."""

    def is_variable(self, value: object) -> bool:
        """Return whether the value is a variable, parameter or array of the backend itself."""

    def is_array(self, value: object) -> bool:
        """Return whether the value is an array, which cannot be written."""

    def read(self, variable: Variable, region: TensorRegion) -> Tensor:
        """Return a region of a variable, as a tensor that later writes do not change."""

    def write(self, variable: Variable, region: TensorRegion, compact: Tensor) -> Variable:
        """Write a region of a variable, in place where that is possible, and return the variable.

        An array is not changed; a new one is returned.
        """

    def trainable_like(self, variable: Variable, value: Tensor, name: str) -> Variable:
        """Return a trainable variable with this value: the backend's own kind if the given one is, else Keras'."""

    def sparse_rows(self, gradient: Gradient) -> tuple[Tensor, Tensor] | None:
        """Return the row numbers and rows of a sparse gradient, in which rows may repeat; None for a dense one."""

    def distinct_rows(self, indices: Tensor, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return each row of a sparse gradient once, with the values of repeated rows summed.

        Where shapes must be known there are as many rows as were given; the surplus ones have the number `count`.
        """

    def read_rows(self, variable: Variable, rows: Tensor) -> Tensor:
        """Return rows of a variable. For the row number `count` (see `distinct_rows`) any values may come."""

    def write_rows(self, variable: Variable, rows: Tensor, values: Tensor) -> None:
        """Write rows of a variable in place. The row number `count` (see `distinct_rows`) is left out."""

    def Link(self, part: LinkedPart) -> Link:
        """Return the link that keeps the base of a part and the part's variable in step."""


class Gradients(Protocol):
    """Operations with gradients of our own, and gradients of any function."""

    def product_with_part_gradient(self, operation: Operation, x: Tensor, kernel: Tensor, part: Tensor) -> Tensor:
        """Return `operation.forward(x, kernel)`, with gradients for x and for the part merged into the kernel.

        The part's gradient is `operation.gradient_part(operation.keep(x), dy)`, cast to its dtype; the kernel itself
        gets none. The gradient for x is `operation.gradient_x(dy, kernel, x)`, or the backend's own.
        """

    def linear_vjp(self, function: Callable[[Tensor], Tensor], at: Tensor, dy: Tensor) -> Tensor:
        """Return the gradient for the argument of a linear function; of `at`, only shape and dtype matter."""

    def look_up(self, rows: RowSlots, tokens: Tensor, table: Tensor, part: LinkedPart) -> Tensor:
        """Return the table's rows for the tokens, the part's where a row is selected, with a gradient for the part."""

    def forward_with_gradients(
        self, function: Callable[[], tuple[Tensor, T]], sources: Sequence[Variable]
    ) -> tuple[Tensor, T, Any]:
        """Run a function that returns a loss and more. Return both, and a function that gives the loss's gradients.

        That function takes positions in `sources` and can be called again. A gradient is None, or zero, where the loss
        does not depend on the source.
        """

    def mask_gradient(self, gradient: Gradient, mask: Tensor) -> Gradient:
        """Return a gradient, dense or sparse, with exact zeros where the mask (which is broadcast) is false."""

    def scale_gradient(self, gradient: Gradient, scale: Tensor) -> Gradient:
        """Return a gradient, dense or sparse, times a number."""


class Control(Protocol):
    """Branches on the value of a tensor."""

    def concrete(self, condition: Tensor) -> bool | None:
        """Return the truth of a scalar, or None while a function is traced, when the value does not exist yet."""

    def branch(self, condition: Tensor, yes: Callable[[], T], no: Callable[[], T]) -> T:
        """Return the result of `yes` if the condition holds, else of `no`, with gradients.

        Where compiled functions have no side effects, neither function assigns anything.
        """

    def assign_in_branch(
        self, condition: Tensor, yes: Callable[[], Any], no: Callable[[], Any], variables: Sequence[keras.Variable]
    ) -> None:
        """Run `yes` if the condition holds, else `no`; both assign to these variables and no others."""

    def single_replica(self) -> bool:
        """Return whether the step runs on one replica.

        Replicas may take different branches, and would then deadlock in the all-reduce of gradients.
        """


class Training(Protocol):
    """What surrounds a training step. Where a backend has nothing to do, `defaults` does nothing."""

    def stepping(self, optimizer: keras.optimizers.Optimizer, links: Sequence[Link]) -> AbstractContextManager[None]:
        """Context manager: after each of the optimizer's steps the bases hold the merged values, without a copy."""

    def creation_scope(self, model: keras.Model) -> AbstractContextManager[Any]:
        """Context manager: variables that belong to the model can be created (the scope of its strategy)."""

    def outside_of_graphs(self) -> AbstractContextManager[Any]:
        """Context manager: variables and constants can be made while a function is traced."""

    def no_gradients(self) -> AbstractContextManager[None]:
        """Context manager: do not record gradients, and do not advance the backend's random state (torch only)."""

    def without_gradients(self, variables: Sequence[keras.Variable]) -> AbstractContextManager[None]:
        """Context manager: the variables hold no gradients of an earlier backward pass (torch only)."""

    def torch_module_reads(self, layer: keras.Layer) -> AbstractContextManager[None]:
        """Context manager: a torch module that the layer wraps reads the Keras values of its weights (torch only)."""

    def parameters_listed(
        self, layer: keras.Layer, variables: Sequence[keras.Variable]
    ) -> AbstractContextManager[None]:
        """Context manager: the parameters of the layer, as a torch module, include these variables (torch only)."""

    def graph(self) -> Any:
        """Return the function graph that is being traced, outside of which its tensors cannot be used (TF only)."""

    def forget_traces(self, layers: Collection[keras.Layer]) -> None:
        """Let compiled methods of these layers be traced again (`tf.function` only)."""

    def in_trainer_step(self) -> bool:
        """Return whether Keras' trainer runs a step that it passes the model's state to (JAX only)."""

    def restore_weights_on_failure(self, model: keras.Model, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled step function, made to give the model its weights back when it fails (JAX only)."""


class Backend(Tensors, Variables, Gradients, Control, Training, Protocol):
    """What finetooth needs of a backend beyond `keras.ops`."""
