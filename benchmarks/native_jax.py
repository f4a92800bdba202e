"""Training steps in plain JAX: finetooth without `fit`, and the hand-written floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from contenders import RATE, Data, Loop, elements, initial

from finetooth.keras_internals.weights import to_numpy
from finetooth.regions.indexing import region_at


def looped(step: Callable[..., Any], state: Any, frozen: Any, data: Data) -> tuple[Loop, list]:
    """A loop of `state, loss = step(state, frozen, x, y)`, and the list that holds its newest state.

    Each step may reuse the memory of the state it is given, and not that of what is frozen.
    """
    compiled = jax.jit(step, donate_argnums=0)
    holder = [state]

    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        holder[0], loss = compiled(holder[0], frozen, x, y)
        return loss

    batches = [(jnp.asarray(x), jnp.asarray(y)) for x, y in data.batches]
    return Loop(run, batches, jax.block_until_ready), holder


def own_loop(model: keras.Model, weights: Mapping[str, keras.Variable], data: Data, may_move: Any) -> Loop:
    """A Keras model's step with Keras' Adam, squared error."""
    optimizer = keras.optimizers.Adam(RATE)
    optimizer.build(model.trainable_variables)

    def loss_of(trainable: Any, frozen: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        outputs, _ = model.stateless_call(trainable, frozen, x, training=True)
        return jnp.mean(jnp.square(outputs - y))

    def step(state: Any, frozen: Any, x: jax.Array, y: jax.Array) -> Any:
        trainable, slots = state
        loss, gradients = jax.value_and_grad(loss_of)(trainable, frozen, x, y)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return (trainable, slots), loss

    state = [[jnp.copy(v.value) for v in side] for side in (model.trainable_variables, optimizer.variables)]
    loop, holder = looped(step, tuple(state), [v.value for v in model.non_trainable_variables], data)

    def current() -> dict[str, np.ndarray]:
        for variable, value in zip(model.trainable_variables, holder[0][0]):
            variable.assign(value)
        return {path: to_numpy(v) for path, v in weights.items()}

    return loop.holding(elements(model.trainable_variables), lambda: elements(optimizer.variables), current, may_move)


def slice_floor(depth: int, width: int, low: int, high: int, data: Data) -> Loop:
    """Dense layers of which the square [low:high, low:high] trains, as fast as we can write it in JAX.

    The change of the square is a product of its own, since composing or writing a kernel costs more than that.
    """
    kernels = [jnp.asarray(initial(f"d{i}/kernel", (width, width))) for i in range(depth)]
    biases = [jnp.zeros(width) for _ in kernels]
    parts = [kernel[low:high, low:high] for kernel in kernels]
    zeros = [[jnp.zeros_like(part) for part in parts] for _ in range(2)]

    @jax.custom_vjp
    def product(x: jax.Array, kernel: jax.Array, part: jax.Array) -> jax.Array:
        change = part - kernel[low:high, low:high]
        return (x @ kernel).at[:, low:high].add(x[:, low:high] @ change)

    def forward(x: jax.Array, kernel: jax.Array, part: jax.Array) -> Any:
        return product(x, kernel, part), (x[:, low:high], kernel, part)

    def backward(saved: Any, dy: jax.Array) -> Any:
        kept, kernel, part = saved
        change = part - kernel[low:high, low:high]
        dy_part = dy[:, low:high]
        return (dy @ kernel.T).at[:, low:high].add(dy_part @ change.T), None, kept.T @ dy_part

    product.defvjp(forward, backward)

    def loss_of(parts: Any, frozen: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for (kernel, bias), part in zip(frozen, parts):
            x = jax.nn.relu(product(x, kernel, part) + bias)
        return jnp.mean(jnp.square(x - y))

    def step(state: Any, frozen: Any, x: jax.Array, y: jax.Array) -> Any:
        parts, ms, vs, count = state
        loss, gradients = jax.value_and_grad(loss_of)(parts, frozen, x, y)
        count += 1
        rate = RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        ms = [0.9 * m + 0.1 * g for m, g in zip(ms, gradients)]
        vs = [0.999 * v + 0.001 * jnp.square(g) for v, g in zip(vs, gradients)]
        parts = [part - rate * m / (jnp.sqrt(v) + 1e-7) for part, m, v in zip(parts, ms, vs)]
        return (parts, ms, vs, count), loss

    loop, holder = looped(step, (parts, *zeros, jnp.zeros(())), list(zip(kernels, biases)), data)

    def weights() -> dict[str, np.ndarray]:
        named = {}
        for i, (kernel, bias, part) in enumerate(zip(kernels, biases, holder[0][0])):
            merged = kernel.at[low:high, low:high].set(part)
            named |= {f"d{i}/kernel": np.asarray(merged), f"d{i}/bias": np.asarray(bias)}
        return named

    square = region_at((width, width), (slice(low, high), slice(low, high)))
    may_move = {f"d{i}/kernel": square for i in range(depth)}
    return loop.holding(elements(parts), lambda: elements([*holder[0][1], *holder[0][2]]), weights, may_move)
