"""The universal read: while tuned, a variable's value *is* its base composed with its part, whoever reads it.

The variable keeps its identity and gets a class of its own for the time being, derived from the one it had. So layers,
regularizers, a model's own `train_step`, a tied head, `numpy()` and `save` all see the merged tensor, with a gradient
that reaches the part alone, and no layer needs to know.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from ..backends import backend, keras_private
from ..part import Part

_PART = "_finetooth_composed_with"


class _State(threading.local):
    """Per thread: what the running layer calls have composed, how deep they are, and whether JAX writes state back."""

    def __init__(self) -> None:
        self.composed: dict[int, Any] = {}
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
        composed = _state.composed.get(id(self))
        if composed is not None and keras.backend.standardize_dtype(composed.dtype) == self.dtype:  # type: ignore[attr-defined]
            return composed
        part: Part = self.__dict__[_PART]
        return part.merge(keras.ops.convert_to_tensor(super().value))  # type: ignore[misc]

    def assign(self, value: Any) -> Any:
        """Write base and part. Inside a layer's call nothing is written; when JAX returns state, only the base is."""
        if _state.depth:
            return value
        own_state = _state.syncing or keras_private.raw_value(self) is None
        with _plain(self):
            assigned = self.assign(value)
        if not own_state:
            self.__dict__[_PART].load(assigned)
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
    with _plain(variable):
        return keras.ops.stop_gradient(keras.ops.convert_to_tensor(variable.value))


def merged(part: Part) -> Any:
    """The merged tensor: the base itself, where the backend can write the part into it for next to nothing."""
    return base_value(part.base) if backend.write_live(part) else part.base.value


@contextmanager
def composed(part: Part) -> Iterator[None]:
    """While open, the base variable reads as base composed with part."""
    part.base.__dict__[_PART] = part
    with _as_kind(part.base, Composed):
        try:
            yield
        finally:
            del part.base.__dict__[_PART]


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


@contextmanager
def state_sync() -> Iterator[None]:
    """While open, an assignment is the trainer's state coming back and not somebody's new value."""
    _state.syncing = True
    try:
        yield
    finally:
        _state.syncing = False
