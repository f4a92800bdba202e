"""The pass that scores a batch: without gradients, without a trace on weights, statistics or seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
from keras import ops

from ..backends import backend
from ..errors import BatchError
from ..keras_internals import private as keras_private
from ..keras_internals.hooks import hooked
from ..keras_internals.masks import mask_of

State = Sequence[Any]  # what a step of JAX is given: one tuple of lists of values; empty on the other backends


def predictions(model: keras.Model, state: State, x: Any) -> Any:
    """What the model makes of the batch as in training."""
    options = {"training": True} if keras_private.takes_training(model) else {}
    if state:
        trainable, non_trainable, *_ = state[0]
        return model.stateless_call(trainable, non_trainable, x, **options)[0]
    with keras.StatelessScope(), backend.aside():
        return model(x, **options)


@contextmanager
def held(model: keras.Model, state: State) -> Iterator[keras.StatelessScope | None]:
    """While open, variables have the values of the state, and assignments go to the scope; elsewhere they are real."""
    if not state:
        with backend.aside():
            yield None
        return
    lists = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    mapping = [pair for variables, values in zip(lists, state[0]) for pair in zip(variables, values)]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        yield scope


def with_metrics(model: keras.Model, state: State, scope: keras.StatelessScope | None) -> State:
    """The state with the metrics as they were assigned in the scope."""
    if scope is None:
        return state
    return [(*state[0][:3], [scope.get_current_value(variable) for variable in model.metrics_variables])]


def measured(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> list[Any]:
    """Update the model's metrics with the whole batch. Returns the losses of it, before they are reduced.

    One tensor per output that has a loss, times its weights, with one value or more per example.
    """
    with _noted(model) as raw:
        loss = model.compute_loss(x, y, y_pred, sample_weight)
    _update(model, loss, x, y, y_pred, sample_weight)
    return _weighted(model, raw, sample_weight)


def losses_of(model: keras.Model, y: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, list[Any]]:
    """The compiled loss of the batch and the same losses unreduced, without a change to metrics."""
    with _noted(model) as raw, metrics_kept(model):
        loss = keras_private.compiled_loss(model)(y, y_pred, sample_weight)
    return loss, _weighted(model, raw, sample_weight)


def per_example(losses: Sequence[Any], masks: Sequence[Any]) -> Any:
    """One loss per example: the mean over what else an output has, as far as it is not masked, summed over outputs."""
    return sum(_mean(values, mask) for values, mask in zip(losses, masks))


def masks_of(model: keras.Model, y_pred: Any) -> list[Any]:
    """The Keras mask of each output that has a loss, or None."""
    return [mask_of(_at(path, y_pred)) for path, _ in keras_private.compiled_losses(model)]


class MetricsKept:
    """Metrics that a training step reports and does not update, but for what `update` is given."""

    def __init__(self, model: keras.Model):
        self._model = model
        self._open = False

    def update(self, *batch: Any) -> None:
        """Update them with a loss, inputs, targets, predictions and weights."""
        self._open = True
        try:
            _update(self._model, *batch)
        finally:
            self._open = False

    def update_state(self, original: Any, *args: Any, **kwargs: Any) -> None:
        if self._open:
            original(*args, **kwargs)

    def compute_metrics(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if self._open else self._model.get_metrics_result()


@contextmanager
def metrics_kept(model: keras.Model) -> Iterator[MetricsKept]:
    """While open, a training step reports metrics and does not update them."""
    kept = MetricsKept(model)
    with ExitStack() as stack:
        for metric in keras_private.loss_metrics(model):
            stack.enter_context(hooked(metric, "update_state", kept.update_state))
        stack.enter_context(hooked(model, "compute_metrics", kept.compute_metrics))
        yield kept


def _update(model: keras.Model, loss: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> None:
    number = ops.shape(keras.tree.flatten(y_pred)[0])[0]
    keras_private.loss_metrics(model)[0].update_state(loss, sample_weight=number)
    model.compute_metrics(x, y, y_pred, sample_weight)


@contextmanager
def _noted(model: keras.Model) -> Iterator[list[Any]]:
    """While open, what the compiled loss functions give is noted before it is reduced, in the order of the outputs."""
    raw: list[Any] = []

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        values = original(*args, **kwargs)
        raw.append(values)
        return values

    with ExitStack() as stack:
        for loss in {id(loss): loss for _, (loss, _) in keras_private.compiled_losses(model)}.values():
            stack.enter_context(hooked(loss, "call", call))
        yield raw


def _weighted(model: keras.Model, raw: list[Any], sample_weight: Any) -> list[Any]:
    found = []
    for values, (path, (loss, weight)) in zip(raw, keras_private.compiled_losses(model), strict=True):
        if len(values.shape) == 0:
            raise BatchError(
                f"The loss {loss.name!r} gives one number for a whole batch. Examples can be chosen by losses that "
                "give one for each; leave the mean to Keras."
            )
        values = ops.cast(values, "float32")
        own = _at(path, sample_weight) if keras.tree.is_nested(sample_weight) else sample_weight
        if own is not None:
            values = values * ops.cast(_expanded(own, len(values.shape)), "float32")
        found.append(values if weight is None else values * weight)
    return found


def _mean(values: Any, mask: Any) -> Any:
    axes = tuple(range(1, len(values.shape)))
    if not axes:
        return values
    if mask is None:
        return ops.mean(values, axes)
    counted = ops.broadcast_to(_expanded(ops.cast(mask, values.dtype), len(values.shape)), ops.shape(values))
    return ops.sum(values * counted, axes) / ops.maximum(ops.sum(counted, axes), 1.0)


def _expanded(weights: Any, rank: int) -> Any:
    """Weights per example, or per example and position, for values of this rank."""
    weights = ops.convert_to_tensor(weights)
    while len(weights.shape) < rank:
        weights = ops.expand_dims(weights, -1)
    while len(weights.shape) > rank and weights.shape[-1] == 1:
        weights = ops.squeeze(weights, -1)
    return weights


def _at(path: Sequence[Any], structure: Any) -> Any:
    for key in path:
        structure = structure[key]
    return structure
