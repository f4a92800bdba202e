"""PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import torch

from ..errors import TuningError
from ..hooks import hooked
from . import keras_private


def index(indices: np.ndarray, length: int) -> torch.Tensor:
    return keras.ops.convert_to_tensor(indices, "int64")


def coordinates(arrays: tuple[np.ndarray, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(keras.ops.convert_to_tensor(array, "int64") for array in arrays)


def take(value: torch.Tensor, axis: int, where: Any) -> torch.Tensor:
    if isinstance(where, range):
        return value.narrow(axis, where.start, len(where))
    return value.index_select(axis, where)


def put(value: torch.Tensor, axis: int, where: Any, part: torch.Tensor) -> torch.Tensor:
    if isinstance(where, range):
        return torch.slice_scatter(value, part, axis, where.start, where.stop)
    return value if value.is_meta else value.index_copy(axis, where, part)


def take_points(value: torch.Tensor, coordinates: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return value[coordinates]


def put_points(value: torch.Tensor, coordinates: tuple[torch.Tensor, ...], part: torch.Tensor) -> torch.Tensor:
    return value if value.is_meta else value.index_put(coordinates, part)


# Eager PyTorch runs this Python at every step, where `keras.ops` takes several times as long as the call it makes.
def matmul(a: torch.Tensor, b: torch.Tensor, transpose_a: bool = False, transpose_b: bool = False) -> torch.Tensor:
    return (a.t() if transpose_a else a) @ (b.t() if transpose_b else b)


def einsum(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.einsum(equation, a, b)


def as_matrix(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1, value.shape[-1])


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, contraction: Any, x: torch.Tensor, kernel: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        ctx.contraction = contraction
        ctx.save_for_backward(contraction.keep(x) if ctx.needs_input_grad[3] else None, kernel)
        return contraction.forward(x, kernel)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise TuningError(
                "A slice of a kernel is read in a way that has no second derivatives on PyTorch. "
                'Use tune(..., reading="composed") for gradient penalties and the like.'
            )
        kept, kernel = ctx.saved_tensors
        for_x = ctx.contraction.gradient_x(dy, kernel) if ctx.needs_input_grad[1] else None
        for_part = ctx.contraction.gradient_part(kept, dy) if ctx.needs_input_grad[3] else None
        return None, for_x, None, for_part


def contract(contraction: Any, x: torch.Tensor, kernel: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return _Contract.apply(contraction, x, kernel, part)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, tokens: torch.Tensor, table: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        slots = rows.slots(tokens)
        ctx.count = rows.count
        ctx.save_for_backward(slots)
        own = part[slots.clamp(min=0)]
        return torch.where(slots.unsqueeze(-1) >= 0, own, keras.ops.take(table, tokens, axis=0))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (slots,) = ctx.saved_tensors
        selected = slots >= 0
        summed = torch.zeros((ctx.count, dy.shape[-1]), dtype=dy.dtype, device=dy.device)
        return None, None, None, summed.index_add_(0, slots[selected], dy[selected])


def look_up(rows: Any, tokens: torch.Tensor, table: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return _LookUp.apply(rows, tokens, table, part)


def write_live(part: Any) -> bool:
    indexed = [axis for axis, where in part.place.axes if not isinstance(where, range)]
    if len(indexed) > 1 or torch.compiler.is_compiling() or keras_private.in_stateless_scope():
        return False
    # Through `data`: a layer that is called twice in a step writes the same values twice, which autograd need not mind.
    value, target = keras_private.raw_value(part.variable).data, keras_private.raw_value(part.base).data
    for axis, where in part.place.axes:
        if isinstance(where, range):
            target = target.narrow(axis, where.start, len(where))
    for axis, where in part.place.axes:
        if not isinstance(where, range):
            target.index_copy_(axis, where, value.to(target.dtype))
    if not indexed:
        target.copy_(value)
    return True


def creation_scope(model: keras.Model) -> AbstractContextManager[Any]:
    return nullcontext()


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


@contextmanager
def listing(layer: keras.Layer, variables: list[keras.Variable]) -> Iterator[None]:
    before = layer._modules.get("_torch_params")

    def track_variables(original: Any) -> None:
        # Keras lists `variable.value`, which for a composed variable is a merged copy and no parameter.
        named = {variable.path: variable for variable in layer.variables if not hasattr(variable, keras_private.PART)}
        named |= {f"{variable.path}@{id(variable)}": variable for variable in variables}
        parameters = {name: keras_private.raw_value(variable) for name, variable in named.items()}
        layer._torch_params = torch.nn.ParameterDict(parameters)

    with hooked(layer, "_track_variables", track_variables):
        layer._track_variables()
        try:
            yield
        finally:
            del layer._torch_params
            if before is not None:
                layer._torch_params = before


def guarded(model: keras.Model, function: Any) -> Any:
    return function
