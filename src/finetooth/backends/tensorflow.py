"""TensorFlow."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from .base import as_matrix as as_matrix
from .base import einsum as einsum
from .base import matmul as matmul


class Index(NamedTuple):
    """Indices along an axis, and for every entry of the axis: is it selected, and which part entry it reads."""

    indices: tf.Tensor
    selected: tf.Tensor
    source: tf.Tensor


def index(indices: np.ndarray, length: int) -> Index:
    selected = np.zeros(length, bool)
    selected[indices] = True
    source = np.zeros(length, np.int32)
    source[indices] = np.arange(len(indices))
    return Index(tf.constant(indices, tf.int64), tf.constant(selected), tf.constant(source))


def coordinates(arrays: tuple[np.ndarray, ...]) -> tf.Tensor:
    return tf.constant(np.stack(arrays, axis=-1), tf.int64)


def take(value: Any, axis: int, where: Any) -> tf.Tensor:
    if isinstance(where, range):
        return tf.convert_to_tensor(value)[(slice(None),) * axis + (slice(where.start, where.stop),)]
    return tf.gather(value, where.indices, axis=axis)


def put(value: Any, axis: int, where: Any, part: tf.Tensor) -> tf.Tensor:
    # Concatenation and selection, not scatter: XLA runs scatters serially on a CPU. And a gradient of our own, since
    # TensorFlow's would pass on the rows of an embedding's sparse gradient without summing those that repeat.
    @tf.custom_gradient
    def replaced(part: tf.Tensor) -> Any:
        if isinstance(where, range):
            before, after = range(where.start), range(where.stop, value.shape[axis])
            merged = tf.concat([take(value, axis, before), part, take(value, axis, after)], axis)
        else:
            spread = tf.gather(part, where.source, axis=axis)
            selected = tf.reshape(where.selected, [-1 if i == axis else 1 for i in range(value.shape.rank)])
            merged = tf.where(selected, spread, value)
        return merged, lambda upstream: take(tf.convert_to_tensor(upstream), axis, where)

    return replaced(part)


def take_points(value: Any, coordinates: tf.Tensor) -> tf.Tensor:
    return tf.gather_nd(value, coordinates)


def put_points(value: Any, coordinates: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def put_elements(part: tf.Tensor) -> Any:
        merged = tf.tensor_scatter_nd_update(value, coordinates, part)
        return merged, lambda upstream: tf.gather_nd(tf.convert_to_tensor(upstream), coordinates)

    return put_elements(part)


def contract(contraction: Any, x: tf.Tensor, kernel: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def run(x: tf.Tensor, part: tf.Tensor) -> Any:
        kept = contraction.keep(x)

        def gradient(dy: tf.Tensor) -> Any:
            return contraction.gradient_x(dy, kernel), contraction.gradient_part(kept, dy)

        return contraction.forward(x, kernel), gradient

    return run(x, part)


def look_up(rows: Any, tokens: tf.Tensor, table: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def run(part: tf.Tensor) -> Any:
        slots = rows.slots(tokens)
        own = tf.gather(part, tf.maximum(slots, 0))
        merged = tf.where(slots[..., None] >= 0, own, keras.ops.take(table, tokens, axis=0))
        # Negative segments, the tokens of frozen rows, are left out of the sum.
        return merged, lambda dy: tf.math.unsorted_segment_sum(tf.convert_to_tensor(dy), slots, rows.count)

    return run(part)


def write_live(part: Any) -> bool:
    return False  # a write into a part of a variable makes TensorFlow copy all of it, then or at the next read


def creation_scope(model: keras.Model) -> AbstractContextManager[Any]:
    return model.distribute_strategy.scope()


def foreign_reads(layer: keras.Layer) -> AbstractContextManager[Any]:
    return nullcontext()


def listing(layer: keras.Layer, variables: list[keras.Variable]) -> AbstractContextManager[Any]:
    return nullcontext()


def guarded(model: keras.Model, function: Any) -> Any:
    return function
