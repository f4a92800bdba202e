"""The composed read: while tuned, a variable's value is its base merged with its part, for every reader.

The variable keeps its identity and is of another class for as long; `README.md` says why, and what that relies on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from ..backends import backend
from ..keras_internals import marks, scopes
from ..keras_internals import private as keras_private
from .trainable import TrainablePart


class _State(threading.local):
    """What the running thread does: which merged values its layer calls share, which state is merged already."""

    def __init__(self) -> None:
        self.composed: dict[int, tuple[Any, Any]] = {}  # with the graph in which each was read
        self.live: frozenset[int] = frozenset()
        self.depth = 0
        self.base_only = False
        self.by_user = False


_state = _State()


class Frozen:
    """Mixed into a variable that may not move: what a layer assigns to it while it runs is dropped."""

    def assign(self, value: Any) -> Any:
        return value if _state.depth else super().assign(value)  # type: ignore[misc]


class Composed:
    """Mixed into a variable that a part stands for in some region."""

    @property
    def value(self) -> Any:
        if _state.base_only:
            return super().value  # type: ignore[misc]
        graph, composed = _state.composed.get(id(self), (None, None))
        if composed is not None and graph is backend.graph():
            if keras.backend.standardize_dtype(composed.dtype) == self.dtype:  # type: ignore[attr-defined]
                return composed
        part: TrainablePart = self.__dict__[marks.COMPOSED]
        merged_already = id(self) in _state.live
        held = not merged_already and part.link.holds_merged()
        value = keras.ops.convert_to_tensor(super().value)  # type: ignore[misc]
        if merged_already:
            return value
        return part.link.alias(value) if held else part.merge(value)

    def assign(self, value: Any) -> Any:
        """Write base and part. Inside a layer's call nothing is written; when JAX returns state, only the base is.

        In a training loop that passes the model's state, what is assigned is that state coming back. It holds the part
        as it was before the step, so the part stays as it is.
        """
        if _state.depth:
            return value
        part: TrainablePart = self.__dict__[marks.COMPOSED]
        in_scope = scopes.in_stateless_scope()
        own_state = _state.base_only or keras_private.raw_value(self) is None
        if not own_state and part.passed_as_state and not _state.by_user and not in_scope:
            with base_only():
                assigned = super().assign(part.merge(keras.ops.convert_to_tensor(value, self.dtype)))  # type: ignore
            part.link.write_base()
            return assigned
        with base_only():
            assigned = super().assign(value)  # type: ignore[misc]
        if not own_state:
            if in_scope:
                part.load(assigned)
            else:
                part.link.base_assigned(assigned)
        return assigned

    # Checkpoints and SavedModels of TensorFlow ask the variable for what its value offers.

    def _serialize_to_tensors(self) -> Any:
        with base_only():
            return super()._serialize_to_tensors()  # type: ignore[misc]

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        with base_only():
            return super()._restore_from_tensors(restored_tensors)  # type: ignore[misc]

    def _write_object_proto(self, proto: Any, options: Any) -> Any:
        with base_only():
            return super()._write_object_proto(proto, options)  # type: ignore[misc]

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        with base_only():
            super()._copy_trackable_to_cpu(object_map)  # type: ignore[misc]

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        with base_only():
            return super()._export_to_saved_model_graph(*args, **kwargs)  # type: ignore[misc]

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """What is saved with the variable: the part with a function, which reads it, but not in a checkpoint."""
        children = super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]
        part: TrainablePart = self.__dict__[marks.COMPOSED]
        return {**children, "part": part.variable} if save_type == "savedmodel" else children

    @property
    def _shared_name(self) -> Any:
        with base_only():
            return super()._shared_name  # type: ignore[misc]


@functools.cache
def _with(mixin: Any, kind: Any) -> type:
    """Return a class derived from both, such as `ComposedVariable`."""
    return type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {"__module__": kind.__module__})


@contextmanager
def base_only() -> Iterator[None]:
    """Context manager: variables read and write the base alone, as if there were no part."""
    before, _state.base_only = _state.base_only, True
    try:
        yield
    finally:
        _state.base_only = before


@contextmanager
def assigned_by_user() -> Iterator[None]:
    """Context manager: what is assigned to a base is meant for its part, too, also in a loop that passes state."""
    before, _state.by_user = _state.by_user, True
    try:
        yield
    finally:
        _state.by_user = before


def base_value(variable: keras.Variable) -> Any:
    """What the variable holds: where the base does not hold the merged values, right outside of the region only."""
    return super(Composed, variable).value  # type: ignore[misc]


def merged(part: TrainablePart) -> Any:
    """The merged tensor, for an operation that gives the part its gradient itself."""
    link = part.link
    return part.base.value if link.differentiable_reads or not link.holds_merged() else base_value(part.base)


@contextmanager
def composed(part: TrainablePart) -> Iterator[None]:
    """Context manager: the base variable reads as base merged with part."""
    part.base.__dict__[marks.COMPOSED] = part
    try:
        with as_kind(part.base, Composed), part.link.opened():
            yield
    finally:
        del part.base.__dict__[marks.COMPOSED]


def settle(part: TrainablePart) -> None:
    """Write the part into its base, which then holds the merged values whether or not anybody reads it through us."""
    part.link.sync()
    if not part.link.base_is_current:  # elsewhere a write would round the part to the base's precision
        with base_only():
            backend.write(part.base, part.tensor_region, keras.ops.cast(part.variable.value, part.base.dtype))


@contextmanager
def frozen(variable: keras.Variable) -> Iterator[None]:
    """Context manager: no layer can assign to the variable."""
    with as_kind(variable, Frozen):
        yield


@contextmanager
def as_kind(variable: Any, mixin: type) -> Iterator[None]:
    """Context manager: the variable's class is derived from the mixin and the class it had, and named after both."""
    kind = type(variable)
    variable.__class__ = _with(mixin, kind)  # type: ignore[arg-type]
    try:
        yield
    finally:
        variable.__class__ = kind


@contextmanager
def layer_call(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Context manager: in a layer's call each variable is merged once, however often it is read (in a loop, say).

    A function that TensorFlow traces inside the call has a graph of its own, and merges for itself.
    """
    graph = backend.graph()
    before = {id(v): _state.composed.get(id(v)) for v in variables}
    for variable in variables:
        known = before[id(variable)]
        if known is None or known[0] is not graph:
            _state.composed[id(variable)] = graph, variable.value
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
        for key, known in before.items():
            if known is None:
                _state.composed.pop(key, None)
            else:
                _state.composed[key] = known


def with_merged_state(model: keras.Model, parts: Collection[TrainablePart]) -> Callable[..., Any]:
    """For `stateless_call`: give the model its state with the parts merged in, which it then returns as the new state.

    So a compiled step that is given its old state to reuse, as in `fit` on JAX, writes each part in place.
    """
    by_base = {id(part.base): part for part in parts}

    def stateless_call(original: Any, trained: Sequence[Any], state: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        values = {id(v): value for v, value in zip(model.trainable_variables, trained)}
        if not backend.in_trainer_step():
            for variable in model.non_trainable_variables:
                if isinstance(variable, Composed):
                    variable.__dict__[marks.COMPOSED].passed_as_state = True
        merged = [
            by_base[id(v)].merge(keras.ops.convert_to_tensor(value, v.dtype), values.get(id(by_base[id(v)].variable)))
            if id(v) in by_base
            else value
            for v, value in zip(model.non_trainable_variables, state)
        ]
        merged += state[len(merged) :]  # if there are too many, Keras says so
        outside, _state.live = _state.live, _state.live | by_base.keys()
        try:
            return original(trained, merged, *args, **kwargs)
        finally:
            _state.live = outside

    return stateless_call
