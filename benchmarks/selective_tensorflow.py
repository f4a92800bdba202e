"""Training on a share of each batch by a step of one's own, in TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

losses_of = tf.nn.sparse_softmax_cross_entropy_with_logits


def indexed(share: float) -> type[keras.Model]:
    """Forward and backward on everything; the loss is the mean over the hardest."""

    class Indexed(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                losses = losses_of(y, self(x, training=True))
                count = tf.cast(share * tf.cast(tf.shape(losses)[0], tf.float32), tf.int32)
                loss = tf.reduce_mean(tf.gather(losses, tf.math.top_k(losses, count).indices))
            return _step(self, tape, loss)

    return Indexed


def sampled(share: float) -> type[keras.Model]:
    """Composer's rule: sort by loss, and sample with chances that grow with the rank, by NumPy."""

    class Sampled(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            losses = losses_of(y, self(x, training=True))
            chosen = tf.numpy_function(lambda count: ranks(int(count), share), [tf.shape(losses)[0]], tf.int64)
            kept = tf.gather(tf.argsort(losses), tf.ensure_shape(chosen, (None,)))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(losses_of(tf.gather(y, kept), self(tf.gather(x, kept), training=True)))
            return _step(self, tape, loss)

    return Sampled


def ranks(count: int, share: float) -> np.ndarray:
    chances = ((np.arange(count) + 0.5) / count) ** (1 / share - 1)
    return np.random.choice(count, int(share * count), replace=False, p=chances / chances.sum())


def _step(model: keras.Model, tape: tf.GradientTape, loss: tf.Tensor) -> dict[str, Any]:
    model.optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
    return {"loss": loss}
