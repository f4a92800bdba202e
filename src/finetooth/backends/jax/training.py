"""JAX: what surrounds a training step."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras

from ...keras_internals import private as keras_private


def outside_of_graphs() -> AbstractContextManager[Any]:
    return jax.ensure_compile_time_eval()


class _Thread(threading.local):
    """The thread: is it in a step of Keras' trainer?"""

    in_step = False


_thread = _Thread()


def in_trainer_step() -> bool:
    return _thread.in_step


def restore_weights_on_failure(model: keras.Model, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(state: Any, iterator: Any) -> Any:
        before, _thread.in_step = _thread.in_step, True
        try:
            return function(state, iterator)
        except BaseException:
            _give_back(model, state)
            raise
        finally:
            _thread.in_step = before

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
