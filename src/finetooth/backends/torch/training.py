"""PyTorch: what surrounds a training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import torch

from ...keras_internals import private as keras_private
from ...keras_internals.hooks import hooked
from .links import Link


@contextmanager
def stepping(optimizer: keras.optimizers.Optimizer, links: Sequence[Link]) -> Iterator[None]:
    """Context manager: the bases are written right after each of the optimizer's steps."""

    def apply(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for link in links:
            link.holds_merged()
        return result

    with hooked(optimizer, "apply", apply):
        yield


def outside_of_graphs() -> AbstractContextManager[Any]:
    return nullcontext()


@contextmanager
def no_gradients() -> Iterator[None]:
    with torch.no_grad(), torch.random.fork_rng(range(torch.cuda.device_count())):
        yield


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


def torch_module_reads(layer: keras.Layer) -> AbstractContextManager[Any]:
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
