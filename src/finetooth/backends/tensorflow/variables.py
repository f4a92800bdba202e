"""TensorFlow: read and write variables and their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ..defaults import native_of
from .writes import in_xla, share_reads, write_in_place

if TYPE_CHECKING:
    from ..tensor_region import TensorRegion


def is_variable(value: Any) -> bool:
    return isinstance(value, tf.Variable)


def read(variable: Any, region: TensorRegion) -> tf.Tensor:
    value = native_of(variable)  # of a variable, some rows or points are read by themselves; XLA cannot, and need not
    return region.gather(tf.convert_to_tensor(value) if region.is_whole or in_xla() else value)


def write(variable: Any, region: TensorRegion, compact: tf.Tensor) -> Any:
    target = native_of(variable)
    if not isinstance(target, tf.Variable):  # in a scope where variables have other values
        variable.assign(region.scatter(target, compact))
    elif _is_written_in_place(target) and not region.is_whole:
        write_in_place(target, region, compact)
        share_reads(target)
    else:
        _assign(target, region.scatter(target, compact))
    return variable


def _assign(target: tf.Variable, value: tf.Tensor) -> None:
    """Assign the whole variable, also from within a replica, of which all have the same value."""
    if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        target.assign(value, read_value=False)
        return

    def update(strategy: Any, value: Any) -> None:
        strategy.extended.update(target, lambda own, new: own.assign(new), args=(value,), group=False)

    tf.distribute.get_replica_context().merge_call(update, args=(value,))


def _is_written_in_place(target: tf.Variable) -> bool:
    """Not by XLA, which has its own ways, nor for each replica."""
    return not in_xla() and not isinstance(target, tf.distribute.DistributedValues)


def trainable_like(variable: Any, value: tf.Tensor, name: str) -> Any:
    if isinstance(variable, keras.Variable):
        return keras.Variable(value, dtype=value.dtype.name, name=name)
    return tf.Variable(value, name=name)


def sparse_rows(gradient: Any) -> tuple[tf.Tensor, tf.Tensor] | None:
    return (gradient.indices, gradient.values) if isinstance(gradient, tf.IndexedSlices) else None


def distinct_rows(indices: tf.Tensor, values: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    if not in_xla():
        rows, slots = tf.unique(indices)
        return rows, tf.math.unsorted_segment_sum(values, slots, tf.size(rows))
    order = tf.argsort(indices)
    ordered = tf.gather(indices, order)
    starts = tf.concat([[False], ordered[1:] != ordered[:-1]], 0)
    slots, size = tf.cumsum(tf.cast(starts, tf.int32)), tf.size(indices)
    rows = tf.math.unsorted_segment_max(ordered, slots, size)
    rows = tf.where(rows < 0, tf.cast(count, rows.dtype), rows)  # slots of no row have the least integer
    return rows, tf.math.unsorted_segment_sum(tf.gather(values, order), slots, size)


def read_rows(variable: Any, rows: tf.Tensor) -> tf.Tensor:
    return tf.gather(native_of(variable), rows)


def write_rows(variable: Any, rows: tf.Tensor, values: tf.Tensor) -> None:
    target = native_of(variable)
    tf.raw_ops.ResourceScatterUpdate(resource=target.handle, indices=rows, updates=values)
    if not in_xla():
        share_reads(target)
