"""JAX: read and write variables and their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental.sparse import BCOO

from ...errors import PartError
from .writes import put_points, put_rows, put_windows, replace

if TYPE_CHECKING:
    from ..tensor_region import TensorRegion


def is_variable(value: Any) -> bool:
    return is_array(value)


def is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


def read(variable: Any, region: TensorRegion) -> jax.Array:
    value = jnp.asarray(variable.value if isinstance(variable, keras.Variable) else variable)
    return jnp.copy(value) if region.is_whole else region.gather(value)  # the variable's array may be donated later


def write(variable: Any, region: TensorRegion, compact: jax.Array) -> Any:
    is_variable = isinstance(variable, keras.Variable)
    if region.is_whole:
        if is_variable:
            variable.assign(jnp.copy(compact))  # two variables with one array could not both be donated
        return variable if is_variable else compact
    points = region.points is not None
    function, where = (put_points, region.points) if points else (put_windows, _wheres(region))
    if not is_variable:
        return function.__wrapped__(variable, where, compact)
    replace(variable, function, where, compact)
    return variable


def _wheres(region: TensorRegion) -> dict[int, Any]:
    """For each restricted axis the start of its range, or its indices."""
    return {axis: np.int32(where.start) if isinstance(where, range) else where.indices for axis, where in region.axes}


def trainable_like(variable: Any, value: jax.Array, name: str) -> keras.Variable:
    return keras.Variable(value, dtype=value.dtype, name=name)


def sparse_rows(gradient: Any) -> tuple[jax.Array, jax.Array] | None:
    if not isinstance(gradient, BCOO):
        return None
    if gradient.n_batch or gradient.n_sparse != 1:
        raise PartError(f"A sparse gradient of rows has n_batch=0 and n_sparse=1; received {gradient!r}.")
    return gradient.indices[:, 0], gradient.data


def distinct_rows(indices: jax.Array, values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    rows, slots = jnp.unique(indices, return_inverse=True, size=len(indices), fill_value=count)
    return rows, jax.ops.segment_sum(values, slots, len(indices))


def read_rows(variable: Any, rows: jax.Array) -> jax.Array:
    return jnp.take(variable.value, rows, axis=0, mode="clip")


def write_rows(variable: Any, rows: jax.Array, values: jax.Array) -> None:
    replace(variable, put_rows, rows, values)
