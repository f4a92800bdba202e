"""The universal read: while tuned, a variable's value *is* its base composed with its part, whoever reads it.

The variable keeps its identity and gets a class of its own for the time being, derived from the one it had. So layers,
regularizers, a model's own `train_step`, a tied head, `numpy()` and `save` all see the merged tensor, with a gradient
that reaches the part alone, and no layer needs to know.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from ..backends import backend, keras_private
from ..trained import Trained


class _State(threading.local):
    """Per thread: what the running calls have composed, which variables hold their part, and so on."""

    def __init__(self) -> None:
        self.composed: dict[int, Any] = {}
        self.live: frozenset[int] = frozenset()
        self.depth = 0
        self.syncing = False


_state = _State()


class Frozen:
    """Mixed into a variable that may not move: what a layer assigns to it while it runs is dropped."""

    def assign(self, value: Any) -> Any:
        return value if _state.depth else super().assign(value)  # type: ignore[misc]


class Composed:
    """Mixed into a variable that a part stands for in some region."""

    @property
    def value(self) -> Any:
        if _state.syncing:
            return super().value  # type: ignore[misc]
        composed = _state.composed.get(id(self))
        if composed is not None and keras.backend.standardize_dtype(composed.dtype) == self.dtype:  # type: ignore[attr-defined]
            return composed
        part: Trained = self.__dict__[keras_private.COMPOSED]
        value = keras.ops.convert_to_tensor(super().value)  # type: ignore[misc]
        return value if id(self) in _state.live else part.merge(value)

    def assign(self, value: Any) -> Any:
        """Write base and part. Inside a layer's call nothing is written; when JAX returns state, only the base is."""
        if _state.depth:
            return value
        own_state = _state.syncing or keras_private.raw_value(self) is None
        with _plain(self):
            assigned = self.assign(value)
        if not own_state:
            self.__dict__[keras_private.COMPOSED].load(assigned)
        return assigned


@functools.cache
def _with(mixin: Any, kind: Any) -> type:
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


@contextmanager
def _plain(variable: Any) -> Iterator[None]:
    """The variable as it was made."""
    kind = type(variable)
    variable.__class__ = kind.__mro__[2]
    try:
        yield
    finally:
        variable.__class__ = kind


def base_value(variable: keras.Variable) -> Any:
    """What the variable holds without its part: right outside of the region only."""
    return super(Composed, variable).value  # type: ignore[misc]


def merged(part: Trained) -> Any:
    """The merged tensor: the base itself, where the backend can write the part into it for next to nothing."""
    return base_value(part.base) if backend.write_live(part) else part.base.value


@contextmanager
def composed(part: Trained) -> Iterator[None]:
    """While open, the base variable reads as base composed with part."""
    part.base.__dict__[keras_private.COMPOSED] = part
    with _as_kind(part.base, Composed):
        try:
            yield
        finally:
            del part.base.__dict__[keras_private.COMPOSED]


@contextmanager
def frozen(variable: keras.Variable) -> Iterator[None]:
    """While open, no layer can assign to the variable."""
    with _as_kind(variable, Frozen):
        yield


@contextmanager
def _as_kind(variable: Any, mixin: type) -> Iterator[None]:
    kind = type(variable)
    variable.__class__ = _with(mixin, kind)  # type: ignore[arg-type]
    try:
        yield
    finally:
        variable.__class__ = kind


@contextmanager
def layer_call(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Around a layer's call: compose each variable once, however often the layer reads it (in a loop, say)."""
    fresh = [variable for variable in variables if id(variable) not in _state.composed]
    for variable in fresh:
        _state.composed[id(variable)] = variable.value
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
        for variable in fresh:
            del _state.composed[id(variable)]


def with_merged_state(model: keras.Model, parts: Collection[Trained]) -> Callable[..., Any]:
    """For `stateless_call`: give the model its state with the parts merged in, which it then returns as the new state.

    So a compiled step that is given its old state to reuse, as in `fit` on JAX, writes each part in place.
    """
    by_base = {id(part.base): part for part in parts}

    def stateless_call(original: Any, trained: Sequence[Any], state: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        values = {id(v): value for v, value in zip(model.trainable_variables, trained)}
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


@contextmanager
def state_sync() -> Iterator[None]:
    """While open, a variable is the trainer's state: its base is read, and what is assigned is that coming back."""
    _state.syncing = True
    try:
        yield
    finally:
        _state.syncing = False
