"""Training functions of models that share layers with a tuned one.

Keras compiles a model's training step when `fit` is first called, and keeps it. A function that was compiled before a
tuning would train what the tuning has frozen, and one that was compiled during a tuning would train parts that are no
longer there. Which models share a layer is not known in advance, so every model is asked when it wants its function.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from ..keras_internals import private as keras_private

_lock = threading.RLock()
_tuned: list[_Layers] = []
_watching: list[Any] = []  # our function in the place of Keras', while a model is tuned


class _Layers:
    """The layers of one tuning, and the models that have made their functions anew for it."""

    def __init__(self, layers: Collection[keras.Layer]):
        self.ids = {id(layer) for layer in layers}
        self.models: weakref.WeakSet[keras.Model] = weakref.WeakSet(m for m in layers if isinstance(m, keras.Model))

    def concerns(self, model: keras.Model) -> bool:
        return model not in self.models and not self.ids.isdisjoint(map(id, keras_private.layers_of(model)))


@contextmanager
def training_made_anew(layers: Collection[keras.Layer]) -> Iterator[Callable[[], None]]:
    """Context manager: models that hold one of the layers compile their training step for it, and again afterwards.

    Yields a function that has those which are compiled now compiled again, also in the middle of `fit`.
    """
    mine = _Layers(layers)
    with _lock:
        if not _tuned:
            _watch()
        _tuned.append(mine)
    for model in list(mine.models):
        _forget(model)

    def again() -> None:
        for model in list(mine.models):
            if model.train_function is not None:
                model.make_train_function(force=True)

    try:
        yield again
    finally:
        with _lock:
            _tuned.remove(mine)
            if not _tuned:
                _unwatch()
        for model in list(mine.models):
            _forget(model)


def _forget(model: keras.Model) -> None:
    model.train_function = model.test_function = model.predict_function = None


def _trainer() -> Any:
    """The class from which Keras' models have their training loop."""
    return next(kind for kind in keras.Model.__mro__ if "make_train_function" in kind.__dict__)


def _watch() -> None:
    trainer = _trainer()
    original = trainer.make_train_function

    @functools.wraps(original)
    def make_train_function(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        for layers in list(_tuned):
            if layers.concerns(self):
                layers.models.add(self)
                _forget(self)
        return original(self, *args, **kwargs)

    _watching[:] = [make_train_function]
    trainer.make_train_function = make_train_function


def _unwatch() -> None:
    trainer = _trainer()
    if trainer.make_train_function is _watching[0]:  # if not, another library wraps it: ours then does nothing
        trainer.make_train_function = _watching[0].__wrapped__
