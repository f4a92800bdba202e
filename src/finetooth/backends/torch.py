"""PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import torch

from ..errors import PartError, TuningError
from ..keras_internals import private as keras_private
from .contract import Axes, ProductCosts
from .contract import branch as branch
from .torch_backwards import pull_back as pull_back
from .torch_links import Link as Link
from .torch_links import stepping as stepping
from .torch_listing import listing as listing
from .torch_writes import on as _on
from .torch_writes import write_in_place


def index(indices: np.ndarray, length: int) -> torch.Tensor:
    return keras.ops.convert_to_tensor(indices, "int64")


def coordinates(arrays: tuple[np.ndarray, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(keras.ops.convert_to_tensor(array, "int64") for array in arrays)


def take(value: torch.Tensor, axis: int, where: Any) -> torch.Tensor:
    if isinstance(where, range):
        return value.narrow(axis, where.start, len(where))
    return value.index_select(axis, where.to(value.device))


@torch.compiler.disable  # PyTorch compiles it for one layer, and fails when another has ranges of its own
def put(value: torch.Tensor, axes: Axes, part: torch.Tensor) -> torch.Tensor:
    (axis, where), *rest = axes
    part = put(take(value, axis, where), rest, part) if rest else part.to(value.device)
    if isinstance(where, range):
        return torch.slice_scatter(value, part, axis, where.start, where.stop)
    return value if value.is_meta else value.index_copy(axis, where.to(value.device), part)


def take_points(value: torch.Tensor, coordinates: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return value[_on(value, coordinates)]


def put_points(value: torch.Tensor, coordinates: tuple[torch.Tensor, ...], part: torch.Tensor) -> torch.Tensor:
    return value if value.is_meta else value.index_put(_on(value, coordinates), part.to(value.device))


# Eager PyTorch runs this Python at every step, where `keras.ops` takes several times as long as the call it makes.
def matmul(a: torch.Tensor, b: torch.Tensor, transpose_a: bool = False, transpose_b: bool = False) -> torch.Tensor:
    return (a.t() if transpose_a else a) @ (b.t() if transpose_b else b)


def einsum(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.einsum(equation, a, b)


def as_matrix(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1, value.shape[-1])


class _Attach(torch.autograd.Function):
    """The outputs as they are; on the way back the part gets its gradient from the inputs that were kept."""

    @staticmethod
    def forward(
        ctx: Any, operation: Any, outputs: torch.Tensor, kept: torch.Tensor, part: torch.Tensor
    ) -> torch.Tensor:
        ctx.operation = operation
        ctx.save_for_backward(kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise TuningError(
                "A part of a kernel is read in a way that has no second derivatives on PyTorch. "
                "Use tune(..., layer_rules=False) for gradient penalties and the like."
            )
        (kept,) = ctx.saved_tensors
        return None, dy, None, ctx.operation.gradient_part(kept, dy)


def contract(operation: Any, x: torch.Tensor, kernel: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    if (
        torch.compiler.is_compiling()
    ):  # which fails on `_Attach` for layers of several shapes; the kernel is composed then
        return operation.forward(x, kernel)
    # The gradient for x is PyTorch's own: it keeps nothing for a kernel that takes none.
    outputs = operation.forward(x, kernel.detach())
    if not part.requires_grad or not torch.is_grad_enabled():
        return outputs
    kept = operation.keep(x.detach())
    if 2 * kept.numel() <= x.numel() and kept.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        kept = kept.clone()  # or all of x would stay
    return _Attach.apply(operation, outputs, kept, part)


def product_costs() -> ProductCosts:
    return ProductCosts(10, 1, 170) if _on_cpu() else ProductCosts(4700, 20, 1500)


def alignment() -> int:
    return 1 if _on_cpu() else 8


def _on_cpu() -> bool:
    return keras.ops.zeros(()).device.type == "cpu"


def samples(shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
    starts = np.searchsorted(rows, np.arange(shape[0] + 1))
    where = (keras.ops.convert_to_tensor(indices, "int32") for indices in (starts, columns))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse")  # PyTorch, about itself
        return torch.sparse_csr_tensor(*where, keras.ops.zeros(len(rows), "float32"), shape)


def sampled_product(samples: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.sparse.sampled_addmm(samples.to(wide), a.to(wide).t(), b.to(wide), beta=0).values().to(b.dtype)


class _SumByRow(torch.autograd.Function):
    """The outputs as they are; on the way back the gradients of the part's tokens are summed by row."""

    @staticmethod
    def forward(ctx: Any, rows: Any, outputs: torch.Tensor, tokens: torch.Tensor, part: torch.Tensor) -> Any:
        ctx.rows = rows
        ctx.save_for_backward(tokens)
        return outputs

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        slots = ctx.rows.slots(tokens)
        count = ctx.rows.count
        # What PyTorch's own embedding does; the tokens of frozen rows are its padding, which gets no gradient.
        slots = torch.where(slots < 0, count, slots).long()
        return None, None, None, torch.ops.aten.embedding_dense_backward(dy, slots, count + 1, count, False)[:count]


def look_up(rows: Any, tokens: torch.Tensor, table: torch.Tensor, part: Any) -> torch.Tensor:
    value = part.variable.value
    if part.link.holds_merged():
        outputs = keras.ops.take(table, tokens, axis=0)
        return _SumByRow.apply(rows, outputs.detach(), tokens, value) if torch.is_grad_enabled() else outputs
    slots = rows.slots(tokens)
    own = value.to(table.dtype)[slots.clamp(min=0)]
    return torch.where(slots.unsqueeze(-1) >= 0, own, keras.ops.take(table, tokens, axis=0))


def is_variable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf


def is_array(value: Any) -> bool:
    return False


def read(variable: Any, place: Any) -> torch.Tensor:
    value = _value(variable).detach()
    gathered = place.gather(value)
    shares = gathered.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    return gathered.clone() if shares else gathered


def write(variable: Any, place: Any, compact: torch.Tensor) -> Any:
    target = _value(variable)
    if isinstance(variable, keras.Variable) and keras_private.in_stateless_scope():
        variable.assign(place.scatter(target, compact))
        return variable
    with torch.no_grad():
        write_in_place(target, place, compact.to(target))
    return variable


def _value(variable: Any) -> torch.Tensor:
    return variable.value if isinstance(variable, keras.Variable) else variable


def trainable_like(variable: Any, value: torch.Tensor, name: str) -> Any:
    if isinstance(variable, keras.Variable):
        return keras.Variable(value, dtype=keras.backend.standardize_dtype(value.dtype), name=name)
    return torch.nn.Parameter(value.detach().clone().to(variable.device))


def outside_of_graphs() -> AbstractContextManager[Any]:
    return nullcontext()


@contextmanager
def aside() -> Iterator[None]:
    with torch.no_grad(), torch.random.fork_rng(range(torch.cuda.device_count())):
        yield


def sparse_rows(gradient: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not gradient.is_sparse:
        return None
    if gradient.sparse_dim() != 1:
        raise PartError(f"A sparse gradient of rows has sparse_dim() 1; received one with {gradient.sparse_dim()}.")
    return gradient._indices()[0], gradient._values()  # rows that repeat are fine here, and `coalesce` sorts


def scaled(gradient: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return gradient * scale


def distinct_rows(indices: torch.Tensor, values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, slots = torch.unique(indices, return_inverse=True)
    return rows, values.new_zeros(len(rows), *values.shape[1:]).index_add_(0, slots, values)


def read_rows(variable: Any, rows: torch.Tensor) -> torch.Tensor:
    return _value(variable).detach().index_select(0, rows)


def write_rows(variable: Any, rows: torch.Tensor, values: torch.Tensor) -> None:
    if keras_private.in_stateless_scope():
        variable.assign(variable.value.detach().index_copy(0, rows, values))
        return
    with torch.no_grad():
        _value(variable).index_copy_(0, rows, values)


def known(condition: torch.Tensor) -> bool | None:
    return True if condition.is_meta else bool(condition)  # only shapes are asked for, of what an open gate does


def of_one_mind() -> bool:
    return True


def either(
    condition: torch.Tensor, yes: Callable[[], Any], no: Callable[[], Any], variables: Sequence[keras.Variable]
) -> None:
    (yes if known(condition) else no)()


def where_open(gradient: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if gradient.is_sparse:
        values = where_open(gradient._values(), mask)
        return torch.sparse_coo_tensor(gradient._indices(), values, gradient.shape)
    return torch.where(mask, gradient, 0)


def record(function: Callable[[], tuple[torch.Tensor, Any]], sources: Sequence[Any]) -> Any:
    natives = [_value(source) for source in sources]
    with torch.enable_grad():
        loss, more = function()

    def gradients(chosen: Sequence[int]) -> Any:
        if not loss.requires_grad:
            return [None] * len(chosen)
        wanted = [natives[i] for i in chosen]
        return torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)

    return loss.detach(), more, gradients


def creation_scope(model: keras.Model) -> AbstractContextManager[Any]:
    return nullcontext()


@contextmanager
def without_gradients(variables: Sequence[keras.Variable]) -> Iterator[None]:
    parameters = [keras_private.raw_value(variable) for variable in variables]
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, kept):
            parameter.grad = gradient


def foreign_reads(layer: keras.Layer) -> AbstractContextManager[Any]:
    return _module_reads(layer) if isinstance(layer, keras.layers.TorchModuleWrapper) else nullcontext()


@contextmanager
def _module_reads(layer: keras.Layer) -> Iterator[None]:
    variables = {id(keras_private.raw_value(v)): v for v in keras_private.own_variables(layer)}
    swapped = []
    for module in layer.module.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in variables:
                swapped.append((module, name, parameter))
                module._parameters[name] = variables[id(parameter)].value
    try:
        yield
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter


def guarded(model: keras.Model, function: Any) -> Any:
    return function
