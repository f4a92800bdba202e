"""The metrics of a model whose training step sees only a part of the batch: blocked there, updated with all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
from keras import ops

from ..keras_internals import private as keras_private
from ..keras_internals.hooks import hooked

State = Sequence[Any]  # what a step of JAX is given: one tuple of lists of values; empty on the other backends


def update_metrics(model: keras.Model, loss: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> None:
    """Update the model's loss tracker and metrics with a batch."""
    number = ops.shape(keras.tree.flatten(y_pred)[0])[0]
    keras_private.loss_metrics(model)[0].update_state(loss, sample_weight=number)
    model.compute_metrics(x, y, y_pred, sample_weight)


def state_with_metrics(model: keras.Model, state: State, scope: keras.StatelessScope | None) -> State:
    """Return the state with the metrics as they were assigned in the scope; as it is where there is no scope."""
    if scope is None:
        return state
    return [(*state[0][:3], [scope.get_current_value(variable) for variable in model.metrics_variables])]


class BlockedMetrics:
    """Metrics that a training step reports and does not update, except through `update`."""

    def __init__(self, model: keras.Model):
        self._model = model
        self._updating = False

    def update(self, loss: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> None:
        """Update the metrics all the same, with this batch."""
        self._updating = True
        try:
            update_metrics(self._model, loss, x, y, y_pred, sample_weight)
        finally:
            self._updating = False

    def update_state(self, original: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for the `update_state` of the loss trackers."""
        if self._updating:
            original(*args, **kwargs)

    def compute_metrics(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the model's `compute_metrics`."""
        return original(*args, **kwargs) if self._updating else self._model.get_metrics_result()


@contextmanager
def metrics_blocked(model: keras.Model) -> Iterator[BlockedMetrics]:
    """Context manager: training steps report the model's metrics and do not update them."""
    blocked = BlockedMetrics(model)
    with ExitStack() as stack:
        for metric in keras_private.loss_metrics(model):
            stack.enter_context(hooked(metric, "update_state", blocked.update_state))
        stack.enter_context(hooked(model, "compute_metrics", blocked.compute_metrics))
        yield blocked
