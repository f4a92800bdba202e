"""Training steps on some examples of a batch."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from .evaluate import losses_and_metrics, losses_of, masks_of, per_example, predictions, state_scope
from .keep import KeepRule, ScoredBatch, size_of
from .memory import BatchMemory
from .metrics import metrics_blocked, state_with_metrics


class ExampleSteps:
    """Training steps of a model on some examples of a batch."""

    def __init__(self, model: keras.Model, keep_rule: KeepRule, memory: BatchMemory):
        self.model, self.keep_rule, self.memory = model, keep_rule, memory

    def score_and_train(self, original: Any, state: Any, data: Any, remember: Any = None) -> tuple[Any, dict[str, Any]]:
        """Score the batch, update the metrics with all of it, and train on the examples that are kept.

        Args:
            original: The model's own training step.
            state: The state that JAX gives the step; empty on the other backends.
            data: The batch.
            remember: The numbers of the examples and the step, to remember the scores by, or None.

        Returns:
            What the model's own step returns, and what to add to its logs.
        """
        model = self.model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = predictions(model, state, x)
        with state_scope(model, state) as scope:
            losses = losses_and_metrics(model, x, y, y_pred, sample_weight)
            masks = masks_of(model, y_pred)

            def losses_of_others(predictions: Any) -> Any:
                return per_example(losses_of(model, y, predictions, sample_weight)[1], masks)

            means = per_example(losses, masks) if losses else None
            batch = ScoredBatch(x, y, sample_weight, means, y_pred, losses_of_others)
            scores = self.keep_rule.scores(batch)
            if remember is not None:
                ids, step = remember
                self.memory.remember_scores(ids, scores, step)
            kept, logs = self._kept(scores, batch, [len(values.shape) for values in losses])
        with metrics_blocked(model):
            return original(*state_with_metrics(model, state, scope), kept), logs

    def train_by_scores(self, scores: Any, original: Any, state: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        """Train on the examples kept by known scores. Metrics are of these, since nothing else is computed."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with state_scope(self.model, state) as scope:
            kept, logs = self._kept(scores, ScoredBatch(x, y, sample_weight, losses=scores))
        return original(*state_with_metrics(self.model, state, scope), kept), logs

    def _kept(self, scores: Any, batch: ScoredBatch, ranks: list[int] | None = None) -> tuple[Any, dict[str, Any]]:
        """Return the kept examples as a batch, and what to log. `ranks`: of the losses that the weights multiply."""
        data = (batch.x, batch.y, batch.sample_weight)
        number = size_of(data)
        k = self.keep_rule.count(number)
        indices, weights = self.keep_rule.kept(scores, k, self.memory, batch)
        self.memory.note_counts(seen=number, kept=k)
        self.memory.note_kept(scores, indices)
        x, y, sample_weight = keras.tree.map_structure(
            lambda leaf: None if leaf is None else ops.take(leaf, indices, axis=0), data
        )
        if weights is not None:
            sample_weight = _times(sample_weight, weights, y, ranks)
        return (x, y, sample_weight), self.memory.logs()


def _times(sample_weight: Any, weights: Any, y: Any, ranks: list[int] | None) -> Any:
    """Return the sample weights times weights per example; without sample weights, these for losses of the ranks."""

    def spread(rank: int) -> Any:
        return ops.reshape(weights, (-1,) + (1,) * (rank - 1))

    if sample_weight is not None:
        return keras.tree.map_structure(lambda own: own * ops.cast(spread(len(own.shape)), own.dtype), sample_weight)
    outputs = keras.tree.flatten(y)
    if ranks is None or len(ranks) != len(outputs):
        return weights
    return keras.tree.pack_sequence_as(y, [spread(rank) for rank in ranks])
