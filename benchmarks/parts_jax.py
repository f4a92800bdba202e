"""Updates of some elements, and lazy steps, in JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental.sparse import BCOO

import finetooth as ft

Update = tuple[Callable[[], Any], Callable[[], Any]]


def updates(shape: tuple[int, int], index: Any, only: str | None = None) -> dict[str, Update]:
    x = jnp.ones((8, shape[0]))
    times = jax.jit(lambda w: x @ w)
    part = ft.Part(jnp.zeros(shape), index)
    new = jnp.ones(part.shape)
    where = index if not (isinstance(index, np.ndarray) and index.dtype == bool) else np.nonzero(index)

    def finetooth() -> Update:
        variable = keras.Variable(jnp.zeros(shape))
        mine = ft.Part(variable, index)

        def update() -> None:
            mine.assign(new)
            variable.value.block_until_ready()

        return update, lambda: times(variable.value).block_until_ready()

    def functional(donate: bool, by: Callable[[Any], Any]) -> Update:
        step = jax.jit(by, donate_argnums=0 if donate else ())
        held = [jnp.zeros(shape)]

        def update() -> None:
            held[0] = step(held[0])
            held[0].block_until_ready()

        return update, lambda: times(held[0]).block_until_ready()

    makes = {
        "finetooth": finetooth,
        "finetooth, donated array": lambda: functional(True, lambda w: ft.Part(w, index).assign(new)),
        ".at[].set, donated": lambda: functional(True, lambda w: w.at[where].set(new)),
        ".at[].set": lambda: functional(False, lambda w: w.at[where].set(new)),
    }
    return {name: make() for name, make in makes.items() if only in (None, name)}


def table_steps(rows: int, width: int, lookups: int, only: Sequence[str] = ()) -> dict[str, Callable[[], Any]]:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, rows, lookups), jnp.int32)
    targets = jnp.ones((lookups, width))

    def with_optimizer(optimizer: keras.optimizers.Optimizer, sparse: bool) -> Callable[[], Any]:
        table = keras.Variable(jnp.zeros((rows, width)))
        optimizer.build([table])

        def step(table: Any, state: Any) -> Any:
            if sparse:
                gradient = jax.grad(lambda looked: jnp.mean((looked - targets) ** 2))(table[tokens])
                gradient = BCOO((gradient, tokens[:, None]), shape=table.shape)
            else:
                gradient = jax.grad(lambda table: jnp.mean((table[tokens] - targets) ** 2))(table)
            (table,), state = optimizer.stateless_apply(state, [gradient], [table])
            return table, state

        return _held(step, jnp.zeros((rows, width)), [jnp.array(v.value) for v in optimizer.variables])

    def by_hand() -> Callable[[], Any]:
        def step(table: Any, state: Any) -> Any:
            m, v, count = state
            g = jax.grad(lambda looked: jnp.mean((looked - targets) ** 2))(table[tokens])
            used, slots = jnp.unique(tokens, return_inverse=True, size=lookups, fill_value=rows)
            g = jax.ops.segment_sum(g, slots, lookups)
            count = count + 1
            new_m, new_v = 0.9 * m[used] + 0.1 * g, 0.999 * v[used] + 0.001 * g * g
            rate = 1e-3 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
            m, v = m.at[used].set(new_m, mode="drop"), v.at[used].set(new_v, mode="drop")
            return table.at[used].add(-rate * new_m / (jnp.sqrt(new_v) + 1e-7), mode="drop"), (m, v, count)

        return _held(step, *(jnp.zeros((rows, width)), (jnp.zeros((rows, width)), jnp.zeros((rows, width)), 0.0)))

    makes = {
        "finetooth": lambda: with_optimizer(ft.LazyOptimizer(keras.optimizers.Adam()), True),
        "Keras Adam": lambda: with_optimizer(keras.optimizers.Adam(), False),
        "lazy Adam by hand": by_hand,
    }
    return {name: make() for name, make in makes.items() if name in (only or makes)}


def _held(step: Callable[[Any, Any], Any], table: Any, state: Any) -> Callable[[], Any]:
    compiled = jax.jit(step, donate_argnums=(0, 1))
    held = [table, state]

    def run() -> None:
        held[:] = compiled(*held)
        held[0].block_until_ready()

    return run
