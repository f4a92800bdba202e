"""What others offer on JAX: optax, whose masks choose whole leaves, with a mask on the gradient for a part of one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from contenders import RATE, Data, Loop, elements, initial
from native_jax import looped
from workloads import Make

from finetooth.regions.indexing import region_at


def contenders() -> dict[str, dict[str, Make]]:
    """Further contenders of the workloads, by their names."""
    return {"slice": {"optax, masked gradient": lambda data: masked_stack(data, 4, 1024, 256, 512)}}


def masked_stack(data: Data, depth: int, width: int, low: int, high: int) -> Loop:
    """Adam for the kernels, behind a mask of zeros and ones, and nothing for the biases."""
    square = region_at((width, width), (slice(low, high), slice(low, high)))
    mask = jnp.asarray(square.mask(), "float32")
    parameters = {
        f"d{i}": {"kernel": jnp.asarray(initial(f"d{i}/kernel", (width, width))), "bias": jnp.zeros(width)}
        for i in range(depth)
    }
    on_part = optax.stateless(lambda gradients, _: jax.tree.map(lambda g: g * mask, gradients))
    labels = {name: {"kernel": "trains", "bias": "frozen"} for name in parameters}
    optimizer = optax.partition(
        {"trains": optax.chain(on_part, optax.adam(RATE, eps=1e-7)), "frozen": optax.set_to_zero()}, labels
    )

    def loss_of(parameters: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for layer in parameters.values():
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return jnp.mean(jnp.square(x - y))

    def step(state: Any, frozen: Any, x: jax.Array, y: jax.Array) -> Any:
        parameters, slots = state
        loss, gradients = jax.value_and_grad(loss_of)(parameters, x, y)
        updates, slots = optimizer.update(gradients, slots, parameters)
        return (optax.apply_updates(parameters, updates), slots), loss

    loop, holder = looped(step, (parameters, optimizer.init(parameters)), (), data)

    def weights() -> dict[str, np.ndarray]:
        layers = holder[0][0].items()
        return {f"{layer}/{name}": np.asarray(value) for layer, values in layers for name, value in values.items()}

    return loop.holding(
        depth * width**2,
        lambda: elements(jax.tree.leaves(holder[0][1])),
        weights,
        {f"d{i}/kernel": square for i in range(depth)},
    )
