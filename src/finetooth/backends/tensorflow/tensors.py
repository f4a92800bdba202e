"""TensorFlow: elements of tensors and products of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from ..contract import Axes, AxisIndex, ProductCosts
from ..defaults import along_axis

if TYPE_CHECKING:
    from ..tensor_region import TensorRegion


class Index(NamedTuple):
    """Indices along an axis, and for every entry of the axis: is it selected, and which part entry it reads."""

    indices: tf.Tensor
    selected: tf.Tensor
    source: tf.Tensor


def index(indices: np.ndarray, length: int) -> Index:
    selected, source = along_axis(indices, length)
    return Index(tf.constant(indices, tf.int64), tf.constant(selected), tf.constant(source))


def coordinates(arrays: tuple[np.ndarray, ...]) -> tf.Tensor:
    return tf.constant(np.stack(arrays, axis=-1), tf.int64)


def take(value: Any, axis: int, where: AxisIndex) -> tf.Tensor:
    if isinstance(where, range):
        return tf.convert_to_tensor(value)[(slice(None),) * axis + (slice(where.start, where.stop),)]
    return tf.gather(value, where.indices, axis=axis)


def put(value: Any, axes: Axes, part: tf.Tensor) -> tf.Tensor:
    value, part = tf.convert_to_tensor(value), tf.convert_to_tensor(part)  # a custom gradient may read no variable

    # A gradient of our own: TensorFlow's would pass on the rows of an embedding's sparse gradient without summing those
    # that repeat.
    @tf.custom_gradient
    def replaced(part: tf.Tensor) -> Any:
        def gradient(upstream: Any) -> tf.Tensor:
            upstream = tf.convert_to_tensor(upstream)
            for axis, where in axes:
                upstream = take(upstream, axis, where)
            return upstream

        return put_axes(value, axes, part), gradient

    return replaced(part)


def put_axes(value: tf.Tensor, axes: Axes, part: tf.Tensor) -> tf.Tensor:
    if all(isinstance(where, range) for _, where in axes):
        ranges = [dict(axes).get(axis, range(length)) for axis, length in enumerate(value.shape)]
        begin, end = [where.start for where in ranges], [where.stop for where in ranges]
        return tf.raw_ops.TensorStridedSliceUpdate(
            input=value, begin=begin, end=end, strides=[1] * len(begin), value=part
        )
    (axis, where), *rest = axes
    part = put_axes(take(value, axis, where), rest, part) if rest else part
    if isinstance(where, range):
        return put_axes(value, [(axis, where)], part)
    # Selection, not scatter: XLA runs scatters serially on a CPU.
    selected = tf.reshape(where.selected, [-1 if i == axis else 1 for i in range(value.shape.rank)])
    return tf.where(selected, tf.gather(part, where.source, axis=axis), value)


def replaced(region: TensorRegion, value: tf.Tensor, compact: tf.Tensor) -> tf.Tensor:
    """`value` with the elements of a region replaced."""
    if region.points is not None:
        return tf.tensor_scatter_nd_update(value, region.points, compact)
    return put_axes(value, region.axes, compact)


def take_points(value: Any, coordinates: tf.Tensor) -> tf.Tensor:
    return tf.gather_nd(value, coordinates)


def put_points(value: Any, coordinates: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    value, part = tf.convert_to_tensor(value), tf.convert_to_tensor(part)

    @tf.custom_gradient
    def put_elements(part: tf.Tensor) -> Any:
        merged = tf.tensor_scatter_nd_update(value, coordinates, part)
        return merged, lambda upstream: tf.gather_nd(tf.convert_to_tensor(upstream), coordinates)

    return put_elements(part)


def product_costs() -> ProductCosts:
    return ProductCosts(800, 1, 170)


def alignment() -> int:
    return 8 if tf.config.list_logical_devices("GPU") else 1


def samples(shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.constant(rows, tf.int32), tf.constant(columns, tf.int32)


def sampled_product(samples: tuple[tf.Tensor, tf.Tensor], a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    rows, columns = samples
    return tf.reduce_sum(tf.gather(tf.transpose(a), rows) * tf.gather(tf.transpose(b), columns), axis=1)


def is_dense(value: Any) -> bool:
    return not isinstance(value, (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices))
