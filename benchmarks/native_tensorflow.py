"""Training steps in plain TensorFlow: finetooth without `fit`, and the hand-written floor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from contenders import RATE, Data, Loop, elements, initial

from finetooth.keras_internals.weights import to_numpy
from finetooth.regions.indexing import region_at


def batches(data: Data) -> list:
    return [(tf.constant(x), tf.constant(y)) for x, y in data.batches]


def wait(loss: tf.Tensor) -> None:
    loss.numpy()


def own_loop(model: keras.Model, weights: Mapping[str, keras.Variable], data: Data, may_move: Any) -> Loop:
    """A Keras model's step with Keras' Adam, squared error, compiled by XLA."""
    optimizer = keras.optimizers.Adam(RATE)
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function(jit_compile=True)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return Loop(step, batches(data), wait).holding(
        elements(variables),
        lambda: elements(optimizer.variables),
        lambda: {path: to_numpy(v) for path, v in weights.items()},
        may_move,
    )


def slice_floor(depth: int, width: int, low: int, high: int, data: Data) -> Loop:
    """Dense layers of which the square [low:high, low:high] trains, as fast as we can write it in TensorFlow.

    The change of the square is a product of its own, since a kernel that is written in part is copied, here or there.
    """
    kernels = [tf.Variable(initial(f"d{i}/kernel", (width, width)), trainable=False) for i in range(depth)]
    biases = [tf.Variable(tf.zeros(width), trainable=False) for _ in kernels]
    parts = [tf.Variable(kernel[low:high, low:high]) for kernel in kernels]
    slots = [[tf.Variable(tf.zeros_like(part)) for part in parts] for _ in range(2)]
    count = tf.Variable(0.0)

    def dense(x: tf.Tensor, kernel: tf.Variable, bias: tf.Variable, part: tf.Variable) -> tf.Tensor:
        @tf.custom_gradient
        def product(x: tf.Tensor, part: tf.Tensor) -> Any:
            change = part - kernel[low:high, low:high]
            kept = x[:, low:high]

            def gradient(dy: tf.Tensor) -> Any:
                dy_part = dy[:, low:high]
                dx = tf.matmul(dy, kernel, transpose_b=True)
                dx += _widened(tf.matmul(dy_part, change, transpose_b=True), low, width)
                return dx, tf.matmul(kept, dy_part, transpose_a=True)

            return x @ kernel + _widened(kept @ change, low, width), gradient

        return tf.nn.relu(product(x, part) + bias)

    @tf.function(jit_compile=True)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for kernel, bias, part in zip(kernels, biases, parts):
                x = dense(x, kernel, bias, part)
            loss = tf.reduce_mean(tf.square(x - y))
        count.assign_add(1.0)
        rate = RATE * tf.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        for part, m, v, gradient in zip(parts, *slots, tape.gradient(loss, parts)):
            m.assign(0.9 * m + 0.1 * gradient)
            v.assign(0.999 * v + 0.001 * tf.square(gradient))
            part.assign_sub(rate * m / (tf.sqrt(v) + 1e-7))
        return loss

    def weights() -> dict:
        named = {}
        for i, (kernel, bias, part) in enumerate(zip(kernels, biases, parts)):
            merged = kernel.numpy()
            merged[low:high, low:high] = part.numpy()
            named |= {f"d{i}/kernel": merged, f"d{i}/bias": bias.numpy()}
        return named

    square = region_at((width, width), (slice(low, high), slice(low, high)))
    may_move = {f"d{i}/kernel": square for i in range(depth)}
    return Loop(step, batches(data), wait).holding(
        elements(parts), lambda: sum(elements(slot) for slot in slots), weights, may_move
    )


def _widened(value: tf.Tensor, low: int, width: int) -> tf.Tensor:
    return tf.pad(value, [[0, 0], [low, width - low - value.shape[1]]])
