"""The pass that evaluates a batch: without gradients, without a trace on weights, statistics or seeds."""

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
from .metrics import State, metrics_blocked, update_metrics


def predictions(model: keras.Model, state: State, x: Any) -> Any:
    """Return the model's outputs for the batch, computed as in training. Nothing is assigned."""
    options = {"training": True} if keras_private.takes_training(model) else {}
    if state:
        trainable, non_trainable, *_ = state[0]
        return model.stateless_call(trainable, non_trainable, x, **options)[0]
    with keras.StatelessScope(), backend.no_gradients():
        return model(x, **options)


@contextmanager
def state_scope(model: keras.Model, state: State) -> Iterator[keras.StatelessScope | None]:
    """Context manager: compute without gradients. On JAX variables read and write the given state in the scope yielded.

    On the other backends variables are real, and None is yielded.
    """
    if not state:
        with backend.no_gradients():
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


def losses_and_metrics(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> list[Any]:
    """Update the model's metrics with the batch, and return its losses before they are reduced.

    Returns:
        One tensor per output that has a loss, times its weights, with one value or more per example.
    """
    with _losses_noted(model) as noted:
        loss = model.compute_loss(x, y, y_pred, sample_weight)
    update_metrics(model, loss, x, y, y_pred, sample_weight)
    return _weighted(model, noted, sample_weight)


def losses_of(model: keras.Model, y: Any, y_pred: Any, sample_weight: Any) -> tuple[Any, list[Any]]:
    """Return the compiled loss of the batch, and the same losses before they are reduced. Metrics do not change."""
    with _losses_noted(model) as noted, metrics_blocked(model):
        loss = keras_private.compiled_loss(model)(y, y_pred, sample_weight)
    return loss, _weighted(model, noted, sample_weight)


def per_example(losses: Sequence[Any], masks: Sequence[Any]) -> Any:
    """Return one loss per example: for each output the mean over all but masked positions, summed over outputs."""
    return sum(_mean(values, mask) for values, mask in zip(losses, masks))


def masks_of(model: keras.Model, y_pred: Any) -> list[Any]:
    """Return the Keras mask of each output that has a loss, or None."""
    return [mask_of(_at(path, y_pred)) for path, _ in keras_private.compiled_losses(model)]


@contextmanager
def _losses_noted(model: keras.Model) -> Iterator[list[Any]]:
    """Context manager: note what the compiled loss functions return before it is reduced, in the order of outputs."""
    noted: list[Any] = []

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        values = original(*args, **kwargs)
        noted.append(values)
        return values

    with ExitStack() as stack:
        for loss in {id(loss): loss for _, (loss, _) in keras_private.compiled_losses(model)}.values():
            stack.enter_context(hooked(loss, "call", call))
        yield noted


def _weighted(model: keras.Model, noted: list[Any], sample_weight: Any) -> list[Any]:
    """Return the losses times sample weights and loss weights."""
    found = []
    for values, (path, (loss, weight)) in zip(noted, keras_private.compiled_losses(model), strict=True):
        if len(values.shape) == 0:
            raise BatchError(
                f"The loss {loss.name!r} gives one number for a whole batch. Examples can be kept by losses that "
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
    """Reshape weights per example, or per example and position, for values of this rank."""
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
