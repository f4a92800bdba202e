"""TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .contract import Axes, ProductCosts
from .contract import as_matrix as as_matrix
from .contract import branch as branch
from .contract import einsum as einsum
from .contract import matmul as matmul
from .tensorflow_links import Link as Link
from .tensorflow_links import stepping as stepping
from .tensorflow_writes import Index, in_xla, put_axes, share_reads, write_in_place
from .tensorflow_writes import take as take


def index(indices: np.ndarray, length: int) -> Index:
    selected = np.zeros(length, bool)
    selected[indices] = True
    source = np.zeros(length, np.int32)
    source[indices] = np.arange(len(indices))
    return Index(tf.constant(indices, tf.int64), tf.constant(selected), tf.constant(source))


def coordinates(arrays: tuple[np.ndarray, ...]) -> tf.Tensor:
    return tf.constant(np.stack(arrays, axis=-1), tf.int64)


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


def take_points(value: Any, coordinates: tf.Tensor) -> tf.Tensor:
    return tf.gather_nd(value, coordinates)


def put_points(value: Any, coordinates: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    value, part = tf.convert_to_tensor(value), tf.convert_to_tensor(part)

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


def is_variable(value: Any) -> bool:
    return isinstance(value, tf.Variable)


def is_array(value: Any) -> bool:
    return False


def read(variable: Any, place: Any) -> tf.Tensor:
    value = _value(variable)  # of a variable, some rows or points are read by themselves; XLA cannot, and need not
    return place.gather(tf.convert_to_tensor(value) if place.is_whole or in_xla() else value)


def write(variable: Any, place: Any, compact: tf.Tensor) -> Any:
    target = _value(variable)
    if not isinstance(target, tf.Variable):  # in a scope where variables have other values
        variable.assign(place.scatter(target, compact))
    elif _is_written_in_place(target) and not place.is_whole:
        write_in_place(target, place, compact)
        share_reads(target)
    else:
        _assign(target, place.scatter(target, compact))
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


def _value(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def trainable_like(variable: Any, value: tf.Tensor, name: str) -> Any:
    if isinstance(variable, keras.Variable):
        return keras.Variable(value, dtype=value.dtype.name, name=name)
    return tf.Variable(value, name=name)


def outside_of_graphs() -> AbstractContextManager[Any]:
    return tf.init_scope()


def aside() -> AbstractContextManager[Any]:
    return nullcontext()  # a step opens its tape later


def sparse_rows(gradient: Any) -> tuple[tf.Tensor, tf.Tensor] | None:
    return (gradient.indices, gradient.values) if isinstance(gradient, tf.IndexedSlices) else None


def scaled(gradient: Any, scale: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * scale, gradient.indices, gradient.dense_shape)
    return gradient * scale


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
    return tf.gather(_value(variable), rows)


def write_rows(variable: Any, rows: tf.Tensor, values: tf.Tensor) -> None:
    target = _value(variable)
    tf.raw_ops.ResourceScatterUpdate(resource=target.handle, indices=rows, updates=values)
    if not in_xla():
        share_reads(target)


def known(condition: tf.Tensor) -> bool | None:
    return bool(condition) if tf.executing_eagerly() else None


def of_one_mind() -> bool:
    return tf.distribute.get_strategy().num_replicas_in_sync == 1


def either(
    condition: tf.Tensor, yes: Callable[[], Any], no: Callable[[], Any], variables: Sequence[keras.Variable]
) -> None:
    tf.cond(condition, lambda: _done(yes), lambda: _done(no))


def _done(function: Callable[[], Any]) -> tf.Operation:
    function()
    return tf.no_op()


def where_open(gradient: Any, mask: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(where_open(gradient.values, mask), gradient.indices, gradient.dense_shape)
    return tf.where(mask, gradient, tf.zeros_like(gradient))


def record(function: Callable[[], tuple[tf.Tensor, Any]], sources: Sequence[Any]) -> Any:
    natives = [_value(source) for source in sources]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        for native in natives:
            tape.watch(native)
        loss, more = function()
    return loss, more, lambda chosen: tape.gradient(loss, [natives[i] for i in chosen])


def creation_scope(model: keras.Model) -> AbstractContextManager[Any]:
    return model.distribute_strategy.scope()


def without_gradients(variables: Sequence[keras.Variable]) -> AbstractContextManager[Any]:
    return nullcontext()


def foreign_reads(layer: keras.Layer) -> AbstractContextManager[Any]:
    return nullcontext()


def listing(layer: keras.Layer, variables: list[keras.Variable]) -> AbstractContextManager[Any]:
    return nullcontext()


def guarded(model: keras.Model, function: Any) -> Any:
    return function
