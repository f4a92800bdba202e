"""TensorFlow: operations with gradients of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ..contract import LinkedPart, Operation, RowSlots
from ..defaults import native_of


def product_with_part_gradient(operation: Operation, x: tf.Tensor, kernel: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def run(x: tf.Tensor, part: tf.Tensor) -> Any:
        kept = operation.keep(x)

        def gradient(dy: tf.Tensor) -> Any:
            return operation.gradient_x(dy, kernel, x), tf.cast(operation.gradient_part(kept, dy), part.dtype)

        return operation.forward(x, kernel), gradient

    return run(x, part)


def linear_vjp(function: Callable[[tf.Tensor], tf.Tensor], at: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(at)
        y = function(at)  # a graph leaves this out: nothing uses it
    return tape.gradient(y, at, dy)


def look_up(rows: RowSlots, tokens: tf.Tensor, table: Any, part: LinkedPart) -> tf.Tensor:
    # Straight from the variable: as a tensor it would be copied. And outside, where its gradient is nobody's concern.
    found = tf.stop_gradient(keras.ops.take(table, tokens, axis=0))
    slots = rows.slots(tokens)
    has_part = part.link.holds_merged()

    @tf.custom_gradient
    def run(value: tf.Tensor) -> Any:
        def gradient(dy: Any) -> tf.Tensor:
            # Negative segments, the tokens of frozen rows, are left out of the sum.
            dy = tf.cast(tf.convert_to_tensor(dy), value.dtype)
            return tf.math.unsorted_segment_sum(dy, slots, rows.count)

        if has_part:
            return found, gradient
        own = tf.gather(tf.cast(value, found.dtype), tf.maximum(slots, 0))
        return tf.where(slots[..., None] >= 0, own, found), gradient

    return run(tf.convert_to_tensor(part.variable.value))


def scale_gradient(gradient: Any, scale: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * scale, gradient.indices, gradient.dense_shape)
    return gradient * scale


def mask_gradient(gradient: Any, mask: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(mask_gradient(gradient.values, mask), gradient.indices, gradient.dense_shape)
    return tf.where(mask, gradient, tf.zeros_like(gradient))


def forward_with_gradients(function: Callable[[], tuple[tf.Tensor, Any]], sources: Sequence[Any]) -> Any:
    natives = [native_of(source) for source in sources]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        for native in natives:
            tape.watch(native)
        loss, more = function()
    return loss, more, lambda chosen: tape.gradient(loss, [natives[i] for i in chosen])
