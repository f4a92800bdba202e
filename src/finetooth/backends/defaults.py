"""What several backends do alike. `contract` says what each function does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from .contract import Gradient, Link, Tensor, Variable


def native_of(variable: Variable) -> Any:
    """Return what a Keras variable holds in the scope that is open; anything else as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def along_axis(indices: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each entry of an axis, whether it is selected and the entry of the part that it reads.

    XLA runs a scatter serially on a CPU. A selection among two gathered values is what it computes fast.
    """
    selected = np.zeros(length, bool)
    selected[indices] = True
    source = np.zeros(length, np.int32)
    source[indices] = np.arange(len(indices))
    return selected, source


# `keras.ops` does these well enough where they run once, as a function is traced.


def matmul(a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    a, b = (keras.ops.transpose(x) if turned else x for x, turned in ((a, transpose_a), (b, transpose_b)))
    return keras.ops.matmul(a, b)


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    return keras.ops.einsum(equation, a, b)


def as_matrix(value: Tensor) -> Tensor:
    return keras.ops.reshape(value, (-1, keras.ops.shape(value)[-1]))


def branch(condition: Tensor, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    return keras.ops.cond(condition, yes, no)


# What a backend has no need of.


def is_array(value: object) -> bool:
    return False


def scale_gradient(gradient: Gradient, scale: Tensor) -> Gradient:
    return gradient * scale


def single_replica() -> bool:
    return True


def stepping(optimizer: keras.optimizers.Optimizer, links: Sequence[Link]) -> AbstractContextManager[None]:
    return nullcontext()


def creation_scope(model: keras.Model) -> AbstractContextManager[None]:
    return nullcontext()


def no_gradients() -> AbstractContextManager[None]:
    return nullcontext()


def without_gradients(variables: Sequence[keras.Variable]) -> AbstractContextManager[None]:
    return nullcontext()


def torch_module_reads(layer: keras.Layer) -> AbstractContextManager[None]:
    return nullcontext()


def parameters_listed(layer: keras.Layer, variables: Sequence[keras.Variable]) -> AbstractContextManager[None]:
    return nullcontext()


def graph() -> Any:
    return None


def forget_traces(layers: Collection[keras.Layer]) -> None:
    pass


def in_trainer_step() -> bool:
    return False


def restore_weights_on_failure(model: keras.Model, function: Callable[..., Any]) -> Callable[..., Any]:
    return function
