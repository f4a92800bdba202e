"""TensorFlow: write elements of a variable in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf
from tensorflow.python.ops import control_flow_util  # no public name says whether XLA compiles a graph

if TYPE_CHECKING:
    from ..tensor_region import TensorRegion


def write_in_place(target: tf.Variable, region: TensorRegion, compact: tf.Tensor) -> None:
    if region.points is not None:
        tf.raw_ops.ResourceScatterNdUpdate(ref=target.handle, indices=region.points, updates=compact)
    elif all(isinstance(where, range) for _, where in region.axes):
        ranges = [dict(region.axes).get(axis, range(length)) for axis, length in enumerate(target.shape)]
        begin, end = [where.start for where in ranges], [where.stop for where in ranges]
        tf.raw_ops.ResourceStridedSliceAssign(
            ref=target.handle, begin=begin, end=end, strides=[1] * len(begin), value=compact
        )
    elif [axis for axis, _ in region.axes] == [0]:
        tf.raw_ops.ResourceScatterUpdate(resource=target.handle, indices=region.axes[0][1].indices, updates=compact)
    else:
        tf.raw_ops.ResourceScatterNdUpdate(ref=target.handle, indices=region.leading, updates=compact)


def share_reads(target: tf.Variable) -> None:
    """After a write to some elements TensorFlow copies the variable at every read, in case of another; switch it off.

    The next such write copies the variable only if somebody still holds what was read.
    """
    tf.raw_ops.DisableCopyOnRead(resource=target.handle)


def in_xla() -> bool:
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
