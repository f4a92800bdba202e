"""JAX: write some elements of an array. Compiled once for each kind and shape: where they are is an argument."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from ...keras_internals import private as keras_private


@functools.partial(jax.jit, donate_argnums=0)
def put_points(value: jax.Array, coordinates: tuple[jax.Array, ...], compact: jax.Array) -> jax.Array:
    return value.at[coordinates].set(compact, unique_indices=True, indices_are_sorted=True)


@functools.partial(jax.jit, donate_argnums=0)
def put_windows(value: jax.Array, wheres: dict[int, jax.Array], compact: jax.Array) -> jax.Array:
    """Write one window for each combination of indices; it begins where the ranges do."""
    indexed = [axis for axis, where in wheres.items() if jnp.ndim(where)]
    if not indexed:
        zero = np.int32(0)  # of the others' type, also where integers are of 64 bits
        return jax.lax.dynamic_update_slice(value, compact, [wheres.get(axis, zero) for axis in range(value.ndim)])
    mesh = dict(zip(indexed, jnp.meshgrid(*(wheres[axis] for axis in indexed), indexing="ij")))
    count = mesh[indexed[0]].shape
    starts = jnp.stack(
        [mesh[axis] if axis in mesh else jnp.broadcast_to(where, count) for axis, where in wheres.items()], axis=-1
    )
    windows = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(axis for axis in range(value.ndim) if axis not in mesh),
        inserted_window_dims=tuple(indexed),
        scatter_dims_to_operand_dims=tuple(wheres),
    )
    return jax.lax.scatter(value, starts, compact, windows, indices_are_sorted=True, unique_indices=True)


@functools.partial(jax.jit, donate_argnums=0)
def put_rows(value: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    """Write rows, and leave out those whose number is out of range."""
    return value.at[rows].set(values, mode="drop")


def _holders(variable: Any) -> int:
    """Python's count of who holds the variable's array, with what this call adds to it."""
    return sys.getrefcount(keras_private.raw_value(variable))


def _holders_alone() -> int | None:
    """The count when nobody but a variable holds its array; None if another holder could not be told from that.

    How many references a call adds depends on the version of Python.
    """
    probe = types.SimpleNamespace(_value=object())
    alone = _holders(probe)
    others = [keras_private.raw_value(probe)]
    return alone if _holders(probe) > alone and others else None


ALONE = _holders_alone()


def replace(variable: keras.Variable, function: Any, *args: Any) -> None:
    """Give the variable the value that a compiled function, to which its own is donated, makes of it.

    An array that somebody else holds is kept: the function then runs as it was before it was compiled.
    """
    alone = _holders(variable) == ALONE and variable.value is keras_private.raw_value(variable)
    value = variable.value
    variable.assign((function if alone else function.__wrapped__)(value, *args))
