"""JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental.sparse import BCOO

from ..errors import PartError
from ..keras_internals import private as keras_private
from . import jax_writes
from .contract import Axes, ProductCosts
from .contract import as_matrix as as_matrix
from .contract import einsum as einsum
from .contract import matmul as matmul
from .jax_branches import branch as branch
from .jax_links import Link as Link
from .jax_links import stepping as stepping


class Index(NamedTuple):
    """Indices along an axis, and for every entry of the axis: is it selected, and which part entry it reads."""

    indices: jax.Array
    selected: jax.Array
    source: jax.Array


def index(indices: np.ndarray, length: int) -> Index:
    selected = np.zeros(length, bool)
    selected[indices] = True
    source = np.zeros(length, np.int32)
    source[indices] = np.arange(len(indices))
    return Index(jnp.asarray(indices, jnp.int32), jnp.asarray(selected), jnp.asarray(source))


def coordinates(arrays: tuple[np.ndarray, ...]) -> tuple[jax.Array, ...]:
    # One int32 per axis, never a flat index: a tensor may hold more than 2**31 elements, an axis does not.
    return tuple(jnp.asarray(array, jnp.int32) for array in arrays)


def take(value: jax.Array, axis: int, where: Any) -> jax.Array:
    if isinstance(where, range):
        if isinstance(value, jax.core.Tracer):
            return jax.lax.slice_in_dim(value, where.start, where.stop, axis=axis)
        return jax.lax.dynamic_slice_in_dim(value, where.start, len(where), axis)  # compiled once for all starts
    return jnp.take(value, where.indices, axis=axis, unique_indices=True, indices_are_sorted=True)


def put(value: jax.Array, axes: Axes, part: jax.Array) -> jax.Array:
    if all(isinstance(where, range) for _, where in axes):
        starts = dict((axis, where.start) for axis, where in axes)
        return jax.lax.dynamic_update_slice(value, part, [starts.get(axis, 0) for axis in range(value.ndim)])
    (axis, where), *rest = axes
    part = put(take(value, axis, where), rest, part) if rest else part
    return put(value, [(axis, where)], part) if isinstance(where, range) else _put_indices(axis, value, where, part)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _put_indices(axis: int, value: jax.Array, where: Index, part: jax.Array) -> jax.Array:
    # Selection, not scatter: XLA runs scatters serially on a CPU.
    spread = jnp.take(part, where.source, axis=axis)
    return jnp.where(where.selected.reshape([-1 if i == axis else 1 for i in range(value.ndim)]), spread, value)


def _put_indices_forward(axis: int, value: jax.Array, where: Index, part: jax.Array) -> Any:
    return _put_indices(axis, value, where, part), where


def _put_indices_backward(axis: int, where: Index, upstream: jax.Array) -> Any:
    return None, None, take(upstream, axis, where)


_put_indices.defvjp(_put_indices_forward, _put_indices_backward)


def take_points(value: jax.Array, coordinates: tuple[jax.Array, ...]) -> jax.Array:
    return value[coordinates]


@jax.custom_vjp
def put_points(value: jax.Array, coordinates: tuple[jax.Array, ...], part: jax.Array) -> jax.Array:
    return value.at[coordinates].set(part, unique_indices=True, indices_are_sorted=True)


def _put_points_forward(value: jax.Array, coordinates: tuple[jax.Array, ...], part: jax.Array) -> Any:
    return put_points(value, coordinates, part), coordinates


def _put_points_backward(coordinates: tuple[jax.Array, ...], upstream: jax.Array) -> Any:
    return None, None, take_points(upstream, coordinates)


put_points.defvjp(_put_points_forward, _put_points_backward)


def contract(operation: Any, x: jax.Array, kernel: jax.Array, part: jax.Array) -> jax.Array:
    like, dtype = jax.ShapeDtypeStruct(x.shape, x.dtype), part.dtype

    @jax.custom_vjp
    def run(x: jax.Array, kernel: jax.Array, part: jax.Array) -> jax.Array:
        return operation.forward(x, kernel)

    def forward(x: jax.Array, kernel: jax.Array, part: jax.Array) -> Any:
        return operation.forward(x, kernel), (operation.keep(x), kernel)

    def backward(saved: Any, dy: jax.Array) -> Any:
        kept, kernel = saved
        return operation.gradient_x(dy, kernel, like), None, operation.gradient_part(kept, dy).astype(dtype)

    run.defvjp(forward, backward)
    return run(x, kernel, part)


def pull_back(function: Callable[[jax.Array], jax.Array], at: Any, dy: jax.Array) -> jax.Array:
    (gradient,) = jax.linear_transpose(function, at)(dy)
    return gradient


def product_costs() -> ProductCosts:
    return ProductCosts(800, 1, 170) if jax.default_backend() == "cpu" else ProductCosts(6900, 2.5, 1200)


def alignment() -> int:
    return 1 if jax.default_backend() == "cpu" else 8


def samples(shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32)


def sampled_product(samples: tuple[jax.Array, jax.Array], a: jax.Array, b: jax.Array) -> jax.Array:
    rows, columns = samples
    return jnp.sum(a.T[rows] * b.T[columns], axis=1)


def look_up(rows: Any, tokens: jax.Array, table: jax.Array, part: Any) -> jax.Array:
    return _look_up(rows, tokens, table, part.variable.value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _look_up(rows: Any, tokens: jax.Array, table: jax.Array, part: jax.Array) -> jax.Array:
    slots = rows.slots(tokens)
    own = jnp.take(part.astype(table.dtype), jnp.maximum(slots, 0), axis=0)
    return jnp.where(slots[..., None] >= 0, own, keras.ops.take(table, tokens, axis=0))


def _look_up_forward(rows: Any, tokens: jax.Array, table: jax.Array, part: jax.Array) -> Any:
    return _look_up(rows, tokens, table, part), (rows.slots(tokens), part)


def _look_up_backward(rows: Any, saved: Any, dy: jax.Array) -> Any:
    slots, part = saved
    # A slot out of bounds, the token of a frozen row, is left out of the sum; -1 would be the last row.
    slots = jnp.where(slots < 0, rows.count, slots)
    # In full precision: sums are better, and GPUs add to memory in it without retrying.
    dy = dy.astype(jnp.promote_types(dy.dtype, jnp.float32))
    return None, None, jnp.zeros(part.shape, dy.dtype).at[slots].add(dy, mode="drop").astype(part.dtype)


_look_up.defvjp(_look_up_forward, _look_up_backward)


def is_variable(value: Any) -> bool:
    return is_array(value)


def is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


def read(variable: Any, place: Any) -> jax.Array:
    value = jnp.asarray(variable.value if isinstance(variable, keras.Variable) else variable)
    return jnp.copy(value) if place.is_whole else place.gather(value)  # the variable's array may be donated later


def write(variable: Any, place: Any, compact: jax.Array) -> Any:
    is_variable = isinstance(variable, keras.Variable)
    if place.is_whole:
        if is_variable:
            variable.assign(jnp.copy(compact))  # two variables with one array could not both be donated
        return variable if is_variable else compact
    points = place.points is not None
    function, where = (jax_writes.put_points, place.points) if points else (jax_writes.put_windows, _wheres(place))
    if not is_variable:
        return function.__wrapped__(variable, where, compact)
    jax_writes.replace(variable, function, where, compact)
    return variable


def _wheres(place: Any) -> dict[int, Any]:
    """For each restricted axis the start of its range, or its indices."""
    return {axis: np.int32(where.start) if isinstance(where, range) else where.indices for axis, where in place.axes}


def trainable_like(variable: Any, value: jax.Array, name: str) -> keras.Variable:
    return keras.Variable(value, dtype=value.dtype, name=name)


def outside_of_graphs() -> AbstractContextManager[Any]:
    return jax.ensure_compile_time_eval()


def aside() -> AbstractContextManager[Any]:
    return nullcontext()


def sparse_rows(gradient: Any) -> tuple[jax.Array, jax.Array] | None:
    if not isinstance(gradient, BCOO):
        return None
    if gradient.n_batch or gradient.n_sparse != 1:
        raise PartError(f"A sparse gradient of rows has n_batch=0 and n_sparse=1; received {gradient!r}.")
    return gradient.indices[:, 0], gradient.data


def scaled(gradient: Any, scale: jax.Array) -> Any:
    return gradient * scale


def distinct_rows(indices: jax.Array, values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    rows, slots = jnp.unique(indices, return_inverse=True, size=len(indices), fill_value=count)
    return rows, jax.ops.segment_sum(values, slots, len(indices))


def read_rows(variable: Any, rows: jax.Array) -> jax.Array:
    return jnp.take(variable.value, rows, axis=0, mode="clip")


def write_rows(variable: Any, rows: jax.Array, values: jax.Array) -> None:
    jax_writes.replace(variable, jax_writes.put_rows, rows, values)


def known(condition: jax.Array) -> bool | None:
    return None if isinstance(condition, jax.core.Tracer) else bool(condition)


def of_one_mind() -> bool:
    return True


def either(
    condition: jax.Array, yes: Callable[[], Any], no: Callable[[], Any], variables: Sequence[keras.Variable]
) -> None:
    def values_after(function: Callable[[], Any], values: Sequence[jax.Array]) -> list[jax.Array]:
        with keras.StatelessScope(state_mapping=zip(variables, values)) as scope:
            function()
        return [scope.get_current_value(variable) for variable in variables]

    branches = (functools.partial(values_after, function) for function in (yes, no))
    after = jax.lax.cond(condition, *branches, [variable.value for variable in variables])
    for variable, value in zip(variables, after):
        variable.assign(value)


def where_open(gradient: Any, mask: jax.Array) -> Any:
    if isinstance(gradient, BCOO):
        return BCOO((where_open(gradient.data, mask), gradient.indices), shape=gradient.shape)
    return jnp.where(mask, gradient, 0)


class _Collecting(keras.StatelessScope):
    """A scope that knows which variables were assigned to."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.assigned: dict[int, keras.Variable] = {}

    def add_update(self, update: Any) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)


def record(function: Callable[[], tuple[jax.Array, Any]], sources: Sequence[keras.Variable]) -> Any:
    assigned: list[keras.Variable] = []

    def run(values: list[jax.Array]) -> Any:
        with _Collecting(state_mapping=list(zip(sources, values))) as scope:
            loss, more = function()
            assigned[:] = scope.assigned.values()
            return loss, (more, [scope.get_current_value(variable) for variable in assigned])

    loss, pull, (more, state) = jax.vjp(run, [source.value for source in sources], has_aux=True)
    for variable, value in zip(assigned, state):
        variable.assign(value)
    return loss, more, lambda chosen: _pulled(tuple(chosen), pull, jnp.ones_like(loss))


@functools.partial(jax.jit, static_argnums=0)
def _pulled(chosen: tuple[int, ...], pull: Any, upstream: jax.Array) -> list[jax.Array]:
    (gradients,) = pull(upstream)  # of which the compiler leaves out what is not returned
    return [gradients[i] for i in chosen]


def creation_scope(model: keras.Model) -> AbstractContextManager[Any]:
    return nullcontext()


def without_gradients(variables: Sequence[keras.Variable]) -> AbstractContextManager[Any]:
    return nullcontext()


def foreign_reads(layer: keras.Layer) -> AbstractContextManager[Any]:
    return nullcontext()


def listing(layer: keras.Layer, variables: list[keras.Variable]) -> AbstractContextManager[Any]:
    return nullcontext()


def guarded(model: keras.Model, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(state: Any, iterator: Any) -> Any:
        try:
            return function(state, iterator)
        except BaseException:
            _give_back(model, state)
            raise

    return run


def _give_back(model: keras.Model, state: Any) -> None:
    """Keras takes the values out of the variables for a step, and loses them when the step cannot be traced."""
    optimizer = [model.optimizer.variables] if len(state) == 4 else []
    metrics = [model.metrics_variables] if len(state) > 2 else []
    lists = [model.trainable_variables, model.non_trainable_variables, *optimizer, *metrics]
    for variables, values in zip(lists, state):
        for variable, value in zip(variables, values):
            if keras_private.raw_value(variable) is None and not value.is_deleted():
                variable.assign(value)
