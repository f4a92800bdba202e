"""BatchMemory: what selective backpropagation remembers from one step to the next."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from ..keras_internals import private as keras_private

HISTORY = 1024  # number of recent scores that `ft.batch.chances` compares with
_NEVER = -(2**30)


class BatchMemory(keras.metrics.Metric):
    """A Keras metric used as storage.

    Metrics are the only state besides weights and optimizer that all trainers carry through a compiled step. As a
    metric it reports nothing: a step adds `logs()` to its own logs.

    Args:
        seed: The seed of rules that draw random numbers.
        examples: The number of examples whose scores are remembered, for `ft.batch.Stale`.
    """

    def __init__(self, seed: int | None, examples: int = 0):
        super().__init__(name="selective_backprop")
        self.seeds = keras.random.SeedGenerator(seed)
        self.history = self.add_variable((HISTORY,), _not_yet, name="history")
        self.scores = self.add_variable((examples,), "zeros", name="scores")
        self.scored_at = self.add_variable((examples,), _never, dtype="int32", name="scored_at")
        names = ("seen", "kept", "left_out", "thresholds", "threshold_sum")
        self._sums = {name: self.add_variable((), "zeros", name=name) for name in names}
        for variable in self.variables:  # with tokens, they are used inside of a layer
            keras_private.never_cast(variable)

    @property
    def variables(self) -> list[keras.Variable]:
        return [*super().variables, self.seeds.state]

    def reset_state(self) -> None:
        """Set the sums to zero at the start of an epoch. History, scores and seeds stay."""
        for variable in self._sums.values():
            variable.assign(0.0)

    def result(self) -> dict[str, Any]:
        return {}

    def remember_scores(self, ids: Any, scores: Any, step: Any) -> None:
        """Store the scores of these examples, computed at this step."""
        self.scores.assign(ops.scatter_update(self.scores.value, ids[:, None], scores))
        steps = ops.broadcast_to(step, ops.shape(ids))
        self.scored_at.assign(ops.scatter_update(self.scored_at.value, ids[:, None], steps))

    def note_counts(self, seen: Any, kept: Any) -> None:
        """Count the examples of a step."""
        self._add(seen=seen, kept=kept)

    def note_kept(self, scores: Any, indices: Any, among: Any = None) -> None:
        """Note the lowest score that was kept, and how many scores are not finite.

        Args:
            scores: One score per example.
            indices: The indices of the kept examples.
            among: The scores to count those that are not finite among. Default: `scores`.
        """
        finite = ops.isfinite(scores if among is None else among)
        lowest = ops.min(ops.take(scores, indices))
        self._add(
            left_out=ops.sum(ops.cast(ops.logical_not(finite), "float32")),
            thresholds=ops.cast(ops.isfinite(lowest), "float32"),
            threshold_sum=ops.where(ops.isfinite(lowest), lowest, 0.0),
        )

    def logs(self) -> dict[str, Any]:
        """Return means and counts since the epoch began, for Keras' logs."""
        seen, kept, left_out, thresholds, threshold_sum = (variable.value for variable in self._sums.values())
        return {
            "kept_fraction": kept / ops.maximum(seen, 1.0),
            "kept_threshold": threshold_sum / ops.maximum(thresholds, 1.0),
            "nan_losses": left_out * 1.0,  # a tensor: on some backends the value of a variable is the variable itself
        }

    def _add(self, **amounts: Any) -> None:
        for name, amount in amounts.items():
            self._sums[name].assign(self._sums[name].value + ops.cast(amount, "float32"))


def _not_yet(shape: Any, dtype: Any = None) -> Any:
    return ops.convert_to_tensor(np.full(shape, np.nan, "float32"))


def _never(shape: Any, dtype: Any = None) -> Any:
    return ops.convert_to_tensor(np.full(shape, _NEVER, "int32"))
