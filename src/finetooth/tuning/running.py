"""Runs of `fit` on a tuned model: a tuning does not end inside one, nor does one begin with its optimizer after it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from ..backends import backend
from ..errors import TuningError
from ..keras_internals import marks
from ..keras_internals import private as keras_private
from ..keras_internals.hooks import hooked

_running: weakref.WeakKeyDictionary[keras.Model, int] = weakref.WeakKeyDictionary()


@contextmanager
def fits_counted(model: keras.Model) -> Iterator[None]:
    """Context manager: runs of the model's `fit` are known to `check_not_running`."""

    def fit(original: Any, *args: Any, **kwargs: Any) -> Any:
        _running[model] = _running.get(model, 0) + 1
        try:
            return original(*args, **kwargs)
        finally:
            _running[model] -= 1

    with hooked(model, "fit", fit):
        yield


def check_not_running(model: keras.Model) -> None:
    """Raise a `TuningError` while `fit` runs, which on JAX holds the values of all weights.

    Args:
        model: A tuned model, or the upper half of one.
    """
    if _running.get(model):
        raise TuningError(
            f"`fit` of {model.name!r} is running, and its tuning cannot end inside of it (in a callback, or from "
            "another thread). Set model.stop_training = True to end `fit` early, and end the tuning afterwards."
        )


def refuse_used_optimizer(model: keras.Model) -> None:
    """Let `fit` ask for `compile` where the model's optimizer has trained parts, which are no longer there."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return
    if not any(hasattr(variable, marks.PART) for variable in keras_private.trained_by(optimizer)):
        return

    def train_function(*args: Any, **kwargs: Any) -> Any:
        raise TuningError(
            f"The optimizer {optimizer.name!r} of {model.name!r} has trained parts of its weights in a tuning that has "
            "ended. Call model.compile(...) with a new optimizer to train the model itself."
        )

    # `compile` and another tuning take it away.
    model.train_function = backend.restore_weights_on_failure(model, train_function)
