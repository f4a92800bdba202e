"""JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np

from . import keras_private
from .base import as_matrix as as_matrix
from .base import einsum as einsum
from .base import matmul as matmul


class Index(NamedTuple):
    """Indices along an axis, and for every entry of the axis: is it selected, and which part entry it reads."""

    indices: jax.Array
    selected: jax.Array
    source: jax.Array


def index(indices: np.ndarray, length: int) -> Index:
    selected = np.zeros(length, bool)
    selected[indices] = True
    source = np.zeros(length, np.int32)
    source[indices] = np.arange(len(indices))
    return Index(jnp.asarray(indices, jnp.int32), jnp.asarray(selected), jnp.asarray(source))


def coordinates(arrays: tuple[np.ndarray, ...]) -> tuple[jax.Array, ...]:
    # One int32 per axis, never a flat index: a tensor may hold more than 2**31 elements, an axis does not.
    return tuple(jnp.asarray(array, jnp.int32) for array in arrays)


def take(value: jax.Array, axis: int, where: Any) -> jax.Array:
    if isinstance(where, range):
        return jax.lax.slice_in_dim(value, where.start, where.stop, axis=axis)
    return jnp.take(value, where.indices, axis=axis, unique_indices=True, indices_are_sorted=True)


def put(value: jax.Array, axis: int, where: Any, part: jax.Array) -> jax.Array:
    if isinstance(where, range):
        return jax.lax.dynamic_update_slice_in_dim(value, part, where.start, axis)
    return _put_indices(axis, value, where, part)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _put_indices(axis: int, value: jax.Array, where: Index, part: jax.Array) -> jax.Array:
    # Selection, not scatter: XLA runs scatters serially on a CPU.
    spread = jnp.take(part, where.source, axis=axis)
    return jnp.where(where.selected.reshape([-1 if i == axis else 1 for i in range(value.ndim)]), spread, value)


def _put_indices_forward(axis: int, value: jax.Array, where: Index, part: jax.Array) -> Any:
    return _put_indices(axis, value, where, part), where


def _put_indices_backward(axis: int, where: Index, upstream: jax.Array) -> Any:
    return None, None, take(upstream, axis, where)


_put_indices.defvjp(_put_indices_forward, _put_indices_backward)


def take_points(value: jax.Array, coordinates: tuple[jax.Array, ...]) -> jax.Array:
    return value[coordinates]


@jax.custom_vjp
def put_points(value: jax.Array, coordinates: tuple[jax.Array, ...], part: jax.Array) -> jax.Array:
    return value.at[coordinates].set(part, unique_indices=True, indices_are_sorted=True)


def _put_points_forward(value: jax.Array, coordinates: tuple[jax.Array, ...], part: jax.Array) -> Any:
    return put_points(value, coordinates, part), coordinates


def _put_points_backward(coordinates: tuple[jax.Array, ...], upstream: jax.Array) -> Any:
    return None, None, take_points(upstream, coordinates)


put_points.defvjp(_put_points_forward, _put_points_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def contract(contraction: Any, x: jax.Array, kernel: jax.Array, part: jax.Array) -> jax.Array:
    return contraction.forward(x, kernel)


def _contract_forward(contraction: Any, x: jax.Array, kernel: jax.Array, part: jax.Array) -> Any:
    return contraction.forward(x, kernel), (contraction.keep(x), kernel)


def _contract_backward(contraction: Any, saved: Any, dy: jax.Array) -> Any:
    kept, kernel = saved
    return contraction.gradient_x(dy, kernel), None, contraction.gradient_part(kept, dy)


contract.defvjp(_contract_forward, _contract_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def look_up(rows: Any, tokens: jax.Array, table: jax.Array, part: jax.Array) -> jax.Array:
    slots = rows.slots(tokens)
    own = jnp.take(part, jnp.maximum(slots, 0), axis=0)
    return jnp.where(slots[..., None] >= 0, own, keras.ops.take(table, tokens, axis=0))


def _look_up_forward(rows: Any, tokens: jax.Array, table: jax.Array, part: jax.Array) -> Any:
    return look_up(rows, tokens, table, part), rows.slots(tokens)


def _look_up_backward(rows: Any, slots: jax.Array, dy: jax.Array) -> Any:
    # A slot out of bounds, the token of a frozen row, is left out of the sum; -1 would be the last row.
    slots = jnp.where(slots < 0, rows.count, slots)
    return None, None, jnp.zeros((rows.count, dy.shape[-1]), dy.dtype).at[slots].add(dy, mode="drop")


look_up.defvjp(_look_up_forward, _look_up_backward)


def write_live(part: Any) -> bool:
    return False  # an array cannot be written; the compiler may do so, where the merged one replaces it


def creation_scope(model: keras.Model) -> AbstractContextManager[Any]:
    return nullcontext()


def foreign_reads(layer: keras.Layer) -> AbstractContextManager[Any]:
    return nullcontext()


def listing(layer: keras.Layer, variables: list[keras.Variable]) -> AbstractContextManager[Any]:
    return nullcontext()


def guarded(model: keras.Model, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(state: Any, iterator: Any) -> Any:
        try:
            return function(state, iterator)
        except BaseException:
            _give_back(model, state)
            raise

    return run


def _give_back(model: keras.Model, state: Any) -> None:
    """Keras takes the values out of the variables for a step, and loses them when the step cannot be traced."""
    optimizer = [model.optimizer.variables] if len(state) == 4 else []
    metrics = [model.metrics_variables] if len(state) > 2 else []
    lists = [model.trainable_variables, model.non_trainable_variables, *optimizer, *metrics]
    for variables, values in zip(lists, state):
        for variable, value in zip(variables, values):
            if keras_private.raw_value(variable) is None and not value.is_deleted():
                variable.assign(value)
