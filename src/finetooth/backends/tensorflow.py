"""TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from .base import Axes, ProductCosts
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


def put(value: Any, axes: Axes, part: tf.Tensor) -> tf.Tensor:
    # A gradient of our own: TensorFlow's would pass on the rows of an embedding's sparse gradient without summing those
    # that repeat.
    @tf.custom_gradient
    def replaced(part: tf.Tensor) -> Any:
        def gradient(upstream: Any) -> tf.Tensor:
            upstream = tf.convert_to_tensor(upstream)
            for axis, where in axes:
                upstream = take(upstream, axis, where)
            return upstream

        return _put(value, axes, part), gradient

    return replaced(part)


def _put(value: tf.Tensor, axes: Axes, part: tf.Tensor) -> tf.Tensor:
    if all(isinstance(where, range) for _, where in axes):
        ranges = [dict(axes).get(axis, range(length)) for axis, length in enumerate(value.shape)]
        begin, end = [where.start for where in ranges], [where.stop for where in ranges]
        return tf.raw_ops.TensorStridedSliceUpdate(
            input=value, begin=begin, end=end, strides=[1] * len(begin), value=part
        )
    (axis, where), *rest = axes
    part = _put(take(value, axis, where), rest, part) if rest else part
    if isinstance(where, range):
        return _put(value, [(axis, where)], part)
    # Selection, not scatter: XLA runs scatters serially on a CPU.
    selected = tf.reshape(where.selected, [-1 if i == axis else 1 for i in range(value.shape.rank)])
    return tf.where(selected, tf.gather(part, where.source, axis=axis), value)


def take_points(value: Any, coordinates: tf.Tensor) -> tf.Tensor:
    return tf.gather_nd(value, coordinates)


def put_points(value: Any, coordinates: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def put_elements(part: tf.Tensor) -> Any:
        merged = tf.tensor_scatter_nd_update(value, coordinates, part)
        return merged, lambda upstream: tf.gather_nd(tf.convert_to_tensor(upstream), coordinates)

    return put_elements(part)


def contract(operation: Any, x: tf.Tensor, kernel: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def run(x: tf.Tensor, part: tf.Tensor) -> Any:
        kept = operation.keep(x)

        def gradient(dy: tf.Tensor) -> Any:
            return operation.gradient_x(dy, kernel, x), tf.cast(operation.gradient_part(kept, dy), part.dtype)

        return operation.forward(x, kernel), gradient

    return run(x, part)


def pull_back(function: Callable[[tf.Tensor], tf.Tensor], at: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(at)
        y = function(at)  # a graph leaves this out: nothing uses it
    return tape.gradient(y, at, dy)


def product_costs() -> ProductCosts:
    return ProductCosts(800, 1, 170)


def alignment() -> int:
    return 8 if tf.config.list_logical_devices("GPU") else 1


def samples(shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.constant(rows, tf.int32), tf.constant(columns, tf.int32)


def sampled_product(samples: tuple[tf.Tensor, tf.Tensor], a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    rows, columns = samples
    return tf.reduce_sum(tf.gather(tf.transpose(a), rows) * tf.gather(tf.transpose(b), columns), axis=1)


def look_up(rows: Any, tokens: tf.Tensor, table: Any, part: Any) -> tf.Tensor:
    # Straight from the variable: as a tensor it would be copied. And outside, where its gradient is nobody's concern.
    frozen = tf.stop_gradient(keras.ops.take(table, tokens, axis=0))
    slots = rows.slots(tokens)

    @tf.custom_gradient
    def run(value: tf.Tensor) -> Any:
        def gradient(dy: Any) -> tf.Tensor:
            # Negative segments, the tokens of frozen rows, are left out of the sum.
            dy = tf.cast(tf.convert_to_tensor(dy), value.dtype)
            return tf.math.unsorted_segment_sum(dy, slots, rows.count)

        own = tf.gather(tf.cast(value, frozen.dtype), tf.maximum(slots, 0))
        return tf.where(slots[..., None] >= 0, own, frozen), gradient

    return run(tf.convert_to_tensor(part.variable.value))


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
