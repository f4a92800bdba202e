"""TensorFlow."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf


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
    # Concatenation and selection, not scatter: XLA runs scatters serially on a CPU.
    if isinstance(where, range):
        length = value.shape[axis]
        before, after = take(value, axis, range(where.start)), take(value, axis, range(where.stop, length))
        return tf.concat([before, part, after], axis)

    @tf.custom_gradient
    def put_indices(part: tf.Tensor) -> Any:
        spread = tf.gather(part, where.source, axis=axis)
        selected = tf.reshape(where.selected, [-1 if i == axis else 1 for i in range(value.shape.rank)])
        return tf.where(selected, spread, value), lambda upstream: tf.gather(
            tf.convert_to_tensor(upstream), where.indices, axis=axis
        )

    return put_indices(part)


def take_points(value: Any, coordinates: tf.Tensor) -> tf.Tensor:
    return tf.gather_nd(value, coordinates)


def put_points(value: Any, coordinates: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def put_elements(part: tf.Tensor) -> Any:
        merged = tf.tensor_scatter_nd_update(value, coordinates, part)
        return merged, lambda upstream: tf.gather_nd(tf.convert_to_tensor(upstream), coordinates)

    return put_elements(part)


def creation_scope(model: keras.Model) -> AbstractContextManager[Any]:
    return model.distribute_strategy.scope()


def foreign_reads(layer: keras.Layer) -> AbstractContextManager[Any]:
    return nullcontext()


def register(layer: keras.Layer, variable: keras.Variable) -> None:
    """Nothing to do: a TensorFlow layer's variables are those Keras tracks."""


def unregister(layer: keras.Layer, variable: keras.Variable) -> None:
    """Nothing to do."""
