"""TensorFlow: read and write elements of tensors and variables, with no gradients of our own."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops import control_flow_util  # no public name says whether XLA compiles a graph

from .contract import Axes


class Index(NamedTuple):
    """Indices along an axis, and for every entry of the axis: is it selected, and which part entry it reads."""

    indices: tf.Tensor
    selected: tf.Tensor
    source: tf.Tensor


def take(value: Any, axis: int, where: Any) -> tf.Tensor:
    if isinstance(where, range):
        return tf.convert_to_tensor(value)[(slice(None),) * axis + (slice(where.start, where.stop),)]
    return tf.gather(value, where.indices, axis=axis)


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


def replaced(place: Any, value: tf.Tensor, compact: tf.Tensor) -> tf.Tensor:
    """`value` with the elements at a place replaced."""
    if place.points is not None:
        return tf.tensor_scatter_nd_update(value, place.points, compact)
    return put_axes(value, place.axes, compact)


def write_in_place(target: tf.Variable, place: Any, compact: tf.Tensor) -> None:
    if place.points is not None:
        tf.raw_ops.ResourceScatterNdUpdate(ref=target.handle, indices=place.points, updates=compact)
    elif all(isinstance(where, range) for _, where in place.axes):
        ranges = [dict(place.axes).get(axis, range(length)) for axis, length in enumerate(target.shape)]
        begin, end = [where.start for where in ranges], [where.stop for where in ranges]
        tf.raw_ops.ResourceStridedSliceAssign(
            ref=target.handle, begin=begin, end=end, strides=[1] * len(begin), value=compact
        )
    elif [axis for axis, _ in place.axes] == [0]:
        tf.raw_ops.ResourceScatterUpdate(resource=target.handle, indices=place.axes[0][1].indices, updates=compact)
    else:
        tf.raw_ops.ResourceScatterNdUpdate(ref=target.handle, indices=place.leading, updates=compact)


def share_reads(target: tf.Variable) -> None:
    """After a write to some elements TensorFlow copies the variable at every read, in case of another; switch it off.

    The next such write copies the variable only if somebody still holds what was read.
    """
    tf.raw_ops.DisableCopyOnRead(resource=target.handle)


def in_xla() -> bool:
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
