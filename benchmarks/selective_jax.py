"""Training on a share of each batch by a step of one's own, in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras


def losses_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


def indexed(share: float) -> type[keras.Model]:
    """Forward and backward on everything; the loss is the mean over the hardest."""

    class Indexed(keras.Model):
        def train_step(self, state: Any, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

            def hardest(logits: jax.Array) -> jax.Array:
                losses = losses_of(logits, y)
                return jnp.mean(losses[jax.lax.top_k(losses, int(share * len(losses)))[1]])

            return _step(self, state, x, hardest)

    return Indexed


def sampled(share: float) -> type[keras.Model]:
    """Composer's rule: sort by loss, and sample with chances that grow with the rank."""

    class Sampled(keras.Model):
        def train_step(self, state: Any, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            trainable, non_trainable, optimizer, _ = state
            losses = losses_of(self.stateless_call(trainable, non_trainable, x, training=True)[0], y)
            count = len(losses)
            chances = ((jnp.arange(count) + 0.5) / count) ** (1 / share - 1)
            key = jax.random.key(optimizer[0].astype("uint32"))  # the number of the step
            ranks = jax.random.choice(key, count, (int(share * count),), replace=False, p=chances / chances.sum())
            kept = jnp.argsort(losses)[ranks]
            return _step(self, state, x[kept], lambda logits: jnp.mean(losses_of(logits, y[kept])))

    return Sampled


def _step(model: keras.Model, state: Any, x: jax.Array, loss_of: Callable[[jax.Array], jax.Array]) -> Any:
    trainable, non_trainable, optimizer, metrics = state

    def loss(values: Any) -> Any:
        logits, updated = model.stateless_call(values, non_trainable, x, training=True)
        return loss_of(logits), updated

    (value, non_trainable), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
    trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
    return {"loss": value}, (trainable, non_trainable, optimizer, metrics)
