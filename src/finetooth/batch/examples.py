"""Training steps on some examples of a batch."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from . import evaluate as scoring
from .keep import Chooser, size_of
from .memory import Ledger


class ExampleSteps:
    """Training steps on some examples of a batch."""

    def __init__(self, model: keras.Model, chooser: Chooser, ledger: Ledger):
        self.model, self.chooser, self.ledger = model, chooser, ledger

    def scored(self, original: Any, state: Any, data: Any, remember: Any = None) -> tuple[Any, dict[str, Any]]:
        """Score the batch, update the metrics with it, and train on those kept."""
        model, ledger = self.model, self.ledger
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = scoring.predictions(model, state, x)
        with scoring.held(model, state) as scope:
            losses = scoring.measured(model, x, y, y_pred, sample_weight)
            masks = scoring.masks_of(model, y_pred)
            known = {"losses": scoring.per_example(losses, masks) if losses else None}
            known |= {"predictions": y_pred, "x": x, "y": y, "sample_weight": sample_weight}
            known["losses_of"] = lambda predictions: scoring.per_example(
                scoring.losses_of(model, y, predictions, sample_weight)[1], masks
            )
            scores = self.chooser.scores(known)
            if remember is not None:
                ids, step = remember
                ledger.scores.assign(ops.scatter_update(ledger.scores.value, ids[:, None], scores))
                times = ops.broadcast_to(step, ops.shape(ids))
                ledger.scored.assign(ops.scatter_update(ledger.scored.value, ids[:, None], times))
            kept, logs = self._kept(scores, known, data, [len(values.shape) for values in losses])
        with scoring.metrics_kept(model):
            return original(*scoring.with_metrics(model, state, scope), kept), logs

    def chosen_by(self, scores: Any, original: Any, state: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        """Train on those that known scores choose. Metrics are of these, since nothing else is computed."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        known = {"losses": scores, "predictions": None, "x": x, "y": y, "sample_weight": sample_weight}
        with scoring.held(self.model, state) as scope:
            kept, logs = self._kept(scores, known, data)
        return original(*scoring.with_metrics(self.model, state, scope), kept), logs

    def _kept(self, scores: Any, known: Any, data: Any, ranks: list[int] | None = None) -> tuple[Any, dict[str, Any]]:
        """The batch that is left, and what to log. The losses that importance weights are for have these ranks."""
        number = size_of(data)
        k = self.chooser.count(number)
        indices, weights = self.chooser.choose(scores, k, self.ledger, known)
        self.ledger.note(seen=number, kept=k)
        self.ledger.note_choice(scores, indices)
        x, y, sample_weight = keras.tree.map_structure(
            lambda leaf: None if leaf is None else ops.take(leaf, indices, axis=0),
            keras.utils.unpack_x_y_sample_weight(data),
        )
        if weights is not None:
            sample_weight = _times(sample_weight, weights, y, ranks)
        return (x, y, sample_weight), self.ledger.logs()


def _times(sample_weight: Any, weights: Any, y: Any, ranks: list[int] | None) -> Any:
    """Weights per example on top of those that there are; where there are none, for losses of these ranks."""
    spread = lambda rank: ops.reshape(weights, (-1,) + (1,) * (rank - 1))  # noqa: E731
    if sample_weight is not None:
        return keras.tree.map_structure(lambda own: own * ops.cast(spread(len(own.shape)), own.dtype), sample_weight)
    outputs = keras.tree.flatten(y)
    if ranks is None or len(ranks) != len(outputs):
        return weights
    return keras.tree.pack_sequence_as(y, [spread(rank) for rank in ranks])
