"""Ledger: what selective backpropagation remembers from one step to the next."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from ..keras_internals import private as keras_private

HISTORY = 1024  # recent losses that chances are computed from
_NEVER = -(2**30)


class Ledger(keras.metrics.Metric):
    """State that is neither a weight nor the optimizer's: a metric, which every backend carries through a step.

    As a metric it reports nothing: a step adds `logs` to its own.
    """

    def __init__(self, seed: int | None, examples: int = 0):
        super().__init__(name="selective_backprop")
        self.seeds = keras.random.SeedGenerator(seed)
        self.history = self.add_variable((HISTORY,), _not_yet, name="history")
        self.scores = self.add_variable((examples,), "zeros", name="scores")
        self.scored = self.add_variable((examples,), _never, dtype="int32", name="scored")
        names = ("seen", "kept", "left_out", "choices", "thresholds")
        self._sums = {name: self.add_variable((), "zeros", name=name) for name in names}
        for variable in self.variables:  # tokens are chosen inside of a layer
            keras_private.never_cast(variable)

    @property
    def variables(self) -> list[keras.Variable]:
        return [*super().variables, self.seeds.state]

    def reset_state(self) -> None:
        """At the start of an epoch sums begin anew; what is remembered for choosing stays."""
        for variable in self._sums.values():
            variable.assign(0.0)

    def result(self) -> dict[str, Any]:
        return {}

    def note(self, seen: Any, kept: Any) -> None:
        """Count the examples of a step."""
        self._add(seen=seen, kept=kept)

    def note_choice(self, scores: Any, indices: Any, among: Any = None) -> None:
        """Count what a choice left out, of those that count, and the lowest score that it kept."""
        finite = ops.isfinite(scores if among is None else among)
        lowest = ops.min(ops.take(scores, indices))
        self._add(
            left_out=ops.sum(ops.cast(ops.logical_not(finite), "float32")),
            choices=ops.cast(ops.isfinite(lowest), "float32"),
            thresholds=ops.where(ops.isfinite(lowest), lowest, 0.0),
        )

    def logs(self) -> dict[str, Any]:
        """For Keras' logs: means and counts since the epoch began."""
        seen, kept, left_out, choices, thresholds = (variable.value for variable in self._sums.values())
        return {
            "kept_fraction": kept / ops.maximum(seen, 1.0),
            "kept_threshold": thresholds / ops.maximum(choices, 1.0),
            "nan_losses": left_out * 1.0,  # a tensor, where a variable's value is the variable
        }

    def _add(self, **amounts: Any) -> None:
        for name, amount in amounts.items():
            self._sums[name].assign(self._sums[name].value + ops.cast(amount, "float32"))


def _not_yet(shape: Any, dtype: Any = None) -> Any:
    return ops.convert_to_tensor(np.full(shape, np.nan, "float32"))


def _never(shape: Any, dtype: Any = None) -> Any:
    return ops.convert_to_tensor(np.full(shape, _NEVER, "int32"))
