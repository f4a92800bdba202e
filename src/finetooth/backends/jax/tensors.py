"""JAX: elements of arrays and products of matrices."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import JAXSparse

from ..contract import Axes, AxisIndex, ProductCosts
from ..defaults import along_axis


class Index(NamedTuple):
    """Indices along an axis, and for every entry of the axis: is it selected, and which part entry it reads."""

    indices: jax.Array
    selected: jax.Array
    source: jax.Array


def index(indices: np.ndarray, length: int) -> Index:
    selected, source = along_axis(indices, length)
    return Index(jnp.asarray(indices, jnp.int32), jnp.asarray(selected), jnp.asarray(source))


def coordinates(arrays: tuple[np.ndarray, ...]) -> tuple[jax.Array, ...]:
    # One int32 per axis, never a flat index: a tensor may hold more than 2**31 elements, an axis does not.
    return tuple(jnp.asarray(array, jnp.int32) for array in arrays)


def take(value: jax.Array, axis: int, where: AxisIndex) -> jax.Array:
    if isinstance(where, range):
        if isinstance(value, jax.core.Tracer):
            return jax.lax.slice_in_dim(value, where.start, where.stop, axis=axis)
        return jax.lax.dynamic_slice_in_dim(value, where.start, len(where), axis)  # compiled once for all starts
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


def product_costs() -> ProductCosts:
    return ProductCosts(800, 1, 170) if jax.default_backend() == "cpu" else ProductCosts(6900, 2.5, 1200)


def alignment() -> int:
    return 1 if jax.default_backend() == "cpu" else 8


def samples(shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32)


def sampled_product(samples: tuple[jax.Array, jax.Array], a: jax.Array, b: jax.Array) -> jax.Array:
    rows, columns = samples
    return jnp.sum(a.T[rows] * b.T[columns], axis=1)


def is_dense(value: Any) -> bool:
    return not isinstance(value, JAXSparse)
