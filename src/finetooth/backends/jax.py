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
from .base import Axes, ProductCosts
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


def put(value: jax.Array, axes: Axes, part: jax.Array) -> jax.Array:
    if all(isinstance(where, range) for _, where in axes):
        starts = dict((axis, where.start) for axis, where in axes)
        return jax.lax.dynamic_update_slice(value, part, [starts.get(axis, 0) for axis in range(value.ndim)])
    (axis, where), *rest = axes
    part = put(take(value, axis, where), rest, part) if rest else part
    return put(value, [(axis, where)], part) if isinstance(where, range) else _put_indices(axis, value, where, part)


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


def contract(operation: Any, x: jax.Array, kernel: jax.Array, part: jax.Array) -> jax.Array:
    like, dtype = jax.ShapeDtypeStruct(x.shape, x.dtype), part.dtype

    @jax.custom_vjp
    def run(x: jax.Array, kernel: jax.Array, part: jax.Array) -> jax.Array:
        return operation.forward(x, kernel)

    def forward(x: jax.Array, kernel: jax.Array, part: jax.Array) -> Any:
        return operation.forward(x, kernel), (operation.keep(x), kernel)

    def backward(saved: Any, dy: jax.Array) -> Any:
        kept, kernel = saved
        return operation.gradient_x(dy, kernel, like), None, operation.gradient_part(kept, dy).astype(dtype)

    run.defvjp(forward, backward)
    return run(x, kernel, part)


def pull_back(function: Callable[[jax.Array], jax.Array], at: Any, dy: jax.Array) -> jax.Array:
    (gradient,) = jax.linear_transpose(function, at)(dy)
    return gradient


def product_costs() -> ProductCosts:
    return ProductCosts(800, 1, 170) if jax.default_backend() == "cpu" else ProductCosts(6900, 2.5, 1200)


def alignment() -> int:
    return 1 if jax.default_backend() == "cpu" else 8


def samples(shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32)


def sampled_product(samples: tuple[jax.Array, jax.Array], a: jax.Array, b: jax.Array) -> jax.Array:
    rows, columns = samples
    return jnp.sum(a.T[rows] * b.T[columns], axis=1)


def look_up(rows: Any, tokens: jax.Array, table: jax.Array, part: Any) -> jax.Array:
    return _look_up(rows, tokens, table, part.variable.value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _look_up(rows: Any, tokens: jax.Array, table: jax.Array, part: jax.Array) -> jax.Array:
    slots = rows.slots(tokens)
    own = jnp.take(part.astype(table.dtype), jnp.maximum(slots, 0), axis=0)
    return jnp.where(slots[..., None] >= 0, own, keras.ops.take(table, tokens, axis=0))


def _look_up_forward(rows: Any, tokens: jax.Array, table: jax.Array, part: jax.Array) -> Any:
    return _look_up(rows, tokens, table, part), (rows.slots(tokens), part)


def _look_up_backward(rows: Any, saved: Any, dy: jax.Array) -> Any:
    slots, part = saved
    # A slot out of bounds, the token of a frozen row, is left out of the sum; -1 would be the last row.
    slots = jnp.where(slots < 0, rows.count, slots)
    # In full precision: sums are better, and GPUs add to memory in it without retrying.
    dy = dy.astype(jnp.promote_types(dy.dtype, jnp.float32))
    return None, None, jnp.zeros(part.shape, dy.dtype).at[slots].add(dy, mode="drop").astype(part.dtype)


_look_up.defvjp(_look_up_forward, _look_up_backward)


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
