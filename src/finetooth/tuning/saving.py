"""Files of a model that is being tuned are those of the plain model, whichever function of Keras writes them.

Keras' own functions are hooked while a model is tuned, so that what is found here does not depend on the object that
was asked: `model.save`, `keras.saving.save_model`, and every model that shares a layer with a tuned one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras

from ..keras_internals import marks
from ..keras_internals import private as keras_private
from ..keras_internals.hooks import hooked

View = Callable[[], AbstractContextManager[None]]


@contextmanager
def plain_files() -> Iterator[None]:
    """Context manager: files hold plain layers, and no optimizer's state that a plain model could not load."""
    native, legacy = keras_private.saving_modules()
    with ExitStack() as stack:
        for name, around in zip(keras_private.NATIVE_FILES, (_save_state, _load_state)):
            stack.enter_context(hooked(native, name, around))
        for name in keras_private.LEGACY_HDF5:
            stack.enter_context(hooked(legacy, name, _as_plain_model))
        stack.enter_context(hooked(legacy, keras_private.LEGACY_OPTIMIZER, _save_optimizer))
        yield


@contextmanager
def plain_view(layers: Collection[keras.Layer], view: View) -> Iterator[None]:
    """Context manager: the legacy HDF5 functions see the layers within `view()`, as they are when not tuned."""
    for layer in layers:
        layer.__dict__[marks.PLAIN_VIEW] = view
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__[marks.PLAIN_VIEW]


@contextmanager
def optimizer_saved_if_plain(model: keras.Model) -> Iterator[None]:
    """Context manager: when it has ended, no optimizer of the model is saved for as long as it holds state of parts."""
    try:
        yield
    finally:
        for optimizer in _optimizers_of(model):
            if _holds_parts(optimizer):
                for member in keras_private.optimizers_in(optimizer):
                    _leave_out(member, optimizer)


def _optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the optimizers that are attributes of the model, or in lists or dictionaries that are."""
    found: dict[int, keras.optimizers.Optimizer] = {}
    for value in vars(model).values():
        members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        found |= {id(member): member for member in members if isinstance(member, keras.optimizers.Optimizer)}
    return [*found.values()]


def _leave_out(member: keras.optimizers.Optimizer, optimizer: keras.optimizers.Optimizer) -> None:
    """Let an optimizer, which another consists of, save nothing until that one is built for other variables."""
    name = "save_own_variables"
    original = getattr(type(member), name)

    def save_own_variables(store: Any) -> None:
        if not _holds_parts(optimizer):
            del member.__dict__[name]
            original(member, store)

    member.__dict__[name] = save_own_variables


def _holds_parts(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer was built for parts: the state of a part does not fit the variable it belongs to."""
    return any(hasattr(variable, marks.PART) for variable in keras_private.trained_by(optimizer))


def _save_state(original: Any, saveable: Any, *args: Any, **kwargs: Any) -> None:
    """Save nothing of an optimizer with parts, nor of the optimizers inside it."""
    if not (isinstance(saveable, keras.optimizers.Optimizer) and _holds_parts(saveable)):
        original(saveable, *args, **kwargs)


def _save_optimizer(original: Any, group: Any, optimizer: Any) -> None:
    if not (isinstance(optimizer, keras.optimizers.Optimizer) and _holds_parts(optimizer)):
        original(group, optimizer)


def _load_state(original: Any, saveable: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(saveable, keras.optimizers.Optimizer) and _holds_parts(saveable):
        warnings.warn(
            f"The state of optimizer {saveable.name!r} is not loaded: it trains parts of variables, which a file does "
            "not know.",
            stacklevel=2,
        )
    else:
        original(saveable, *args, **kwargs)


def _as_plain_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    model = next(value for value in (*args, *kwargs.values()) if isinstance(value, keras.Layer))
    layers = keras_private.layers_of(model)
    # Taken off meanwhile: each tuning has hooked the function, and a view is opened once.
    views = {layer: layer.__dict__.pop(marks.PLAIN_VIEW) for layer in layers if marks.PLAIN_VIEW in layer.__dict__}
    try:
        with ExitStack() as stack:
            for view in set(views.values()):
                stack.enter_context(view())
            return original(*args, **kwargs)
    finally:
        for layer, view in views.items():
            layer.__dict__[marks.PLAIN_VIEW] = view
