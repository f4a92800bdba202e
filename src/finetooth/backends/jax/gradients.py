"""JAX: operations with gradients of our own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.experimental.sparse import BCOO

from ...keras_internals import scopes
from ..contract import LinkedPart, Operation, RowSlots


def product_with_part_gradient(operation: Operation, x: jax.Array, kernel: jax.Array, part: jax.Array) -> jax.Array:
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


def linear_vjp(function: Callable[[jax.Array], jax.Array], at: Any, dy: jax.Array) -> jax.Array:
    (gradient,) = jax.linear_transpose(function, at)(dy)
    return gradient


def look_up(rows: RowSlots, tokens: jax.Array, table: jax.Array, part: LinkedPart) -> jax.Array:
    return _look_up(rows, tokens, table, part.variable.value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _look_up(rows: RowSlots, tokens: jax.Array, table: jax.Array, part: jax.Array) -> jax.Array:
    slots = rows.slots(tokens)
    own = jnp.take(part.astype(table.dtype), jnp.maximum(slots, 0), axis=0)
    return jnp.where(slots[..., None] >= 0, own, keras.ops.take(table, tokens, axis=0))


def _look_up_forward(rows: RowSlots, tokens: jax.Array, table: jax.Array, part: jax.Array) -> Any:
    return _look_up(rows, tokens, table, part), (rows.slots(tokens), part)


def _look_up_backward(rows: RowSlots, saved: Any, dy: jax.Array) -> Any:
    slots, part = saved
    # A slot out of bounds, the token of a frozen row, is left out of the sum; -1 would be the last row.
    slots = jnp.where(slots < 0, rows.count, slots)
    # In full precision: sums are better, and GPUs add to memory in it without retrying.
    dy = dy.astype(jnp.promote_types(dy.dtype, jnp.float32))
    return None, None, jnp.zeros(part.shape, dy.dtype).at[slots].add(dy, mode="drop").astype(part.dtype)


_look_up.defvjp(_look_up_forward, _look_up_backward)


def mask_gradient(gradient: Any, mask: jax.Array) -> Any:
    if isinstance(gradient, BCOO):
        return BCOO((mask_gradient(gradient.data, mask), gradient.indices), shape=gradient.shape)
    return jnp.where(mask, gradient, 0)


def forward_with_gradients(function: Callable[[], tuple[jax.Array, Any]], sources: Sequence[keras.Variable]) -> Any:
    assigned: list[keras.Variable] = []

    def run(values: list[jax.Array]) -> Any:
        with scopes.AssignmentScope(zip(sources, values), initialize_variables=True) as scope:
            loss, more = function()
            assigned[:] = scope.assigned.values()
            return loss, (more, [scope.get_current_value(variable) for variable in assigned])

    loss, pull, (more, state) = jax.vjp(run, [source.value for source in sources], has_aux=True)
    for variable, value in zip(assigned, state):
        variable.assign(value)
    return loss, more, lambda chosen: _pulled(tuple(chosen), pull, jnp.ones_like(loss))


@functools.partial(jax.jit, static_argnums=0)
def _pulled(chosen: tuple[int, ...], pull: Any, upstream: jax.Array) -> list[jax.Array]:
    (gradients,) = pull(upstream)  # of which the compiler leaves out what is not returned
    return [gradients[i] for i in chosen]
