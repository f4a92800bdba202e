"""KeepRule: from the losses of a batch to the indices of the examples that are kept, by a score and a rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
from keras import ops

from ..errors import BatchError
from .memory import BatchMemory
from .rules import remembered

FOR_SCORES = ("losses", "losses_of", "predictions", "x", "y", "sample_weight")
FOR_RULES = ("history", "labels", "predictions", "seed", "x", "y")


@dataclass(frozen=True)
class ScoredBatch:
    """A batch and what was computed of it: functions that score are given its fields by name.

    Args:
        x: The inputs.
        y: The targets.
        sample_weight: The weights that came with the batch, or None.
        losses: One loss per example, or per token. None where the model has no compiled loss.
        predictions: The model's outputs. None where known scores are used.
        losses_of: A function from other predictions to their losses. None where known scores are used.
    """

    x: Any
    y: Any
    sample_weight: Any
    losses: Any
    predictions: Any = None
    losses_of: Callable[[Any], Any] | None = None


class KeepRule:
    """How many examples are kept, how they are scored, and by which rule.

    Args:
        keep: The share of a batch to keep, above 0 and at most 1.
        rule: A function as in `ft.batch`, from scores and their number to indices.
        score: A function of fields of a `ScoredBatch`. Default: the losses.

    Raises:
        BatchError: The share is out of range, or a function takes an argument that is not known.
    """

    def __init__(self, keep: float, rule: Callable[..., Any], score: Callable[..., Any] | None):
        if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
            raise BatchError(f"keep is the share of a batch to train on, above 0 and at most 1; received {keep!r}.")
        self.share = float(keep)
        self._score, self._score_names = _named(score or _losses, FOR_SCORES, 0)
        self._rule, self._rule_names = _named(rule, FOR_RULES, 2)

    def count(self, number: Any) -> Any:
        """Return how many of a number are kept: the nearest to the share, at least one. A tensor for a tensor."""
        if isinstance(number, int):
            return max(1, int(number * self.share + 0.5))
        return ops.maximum(1, ops.cast(ops.floor(ops.cast(number, "float32") * self.share + 0.5), "int32"))

    def scores(self, batch: ScoredBatch) -> Any:
        """Return the scores of the batch in float32, one per example or token."""
        return ops.cast(self._score(**{name: getattr(batch, name) for name in self._score_names}), "float32")

    def kept(self, scores: Any, k: Any, memory: BatchMemory, batch: ScoredBatch) -> tuple[Any, Any]:
        """Return the indices of the k that are kept, and weights for them if the rule gives any, or None."""
        known = {
            "history": memory.history.value,
            "labels": batch.y,
            "predictions": batch.predictions,
            "seed": memory.seeds,
            "x": batch.x,
            "y": batch.y,
        }
        found = self._rule(scores, k, **{name: known[name] for name in self._rule_names})
        if "history" in self._rule_names:
            memory.history.assign(remembered(known["history"], scores))
        return found if isinstance(found, tuple) else (found, None)


def _losses(losses: Any) -> Any:
    return losses


def _named(function: Callable[..., Any], known: tuple[str, ...], given: int) -> tuple[Callable[..., Any], list[str]]:
    """Return the function and the names of the arguments that it takes beyond the first `given` ones."""
    if not callable(function):
        raise BatchError(f"Expected a function; received {function!r}.")
    parameters = list(inspect.signature(function).parameters.values())
    fixed = set(function.keywords) if isinstance(function, partial) else set()
    names = []
    for parameter in parameters[given:]:
        if parameter.name in known and parameter.name not in fixed:
            names.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            raise BatchError(
                f"A function that scores or keeps examples takes arguments among {', '.join(known)}; received one that "
                f"takes {parameter.name!r}, which is not known to it. Rename the argument, or give it a default."
            )
    if len(parameters) < given:
        raise BatchError("A rule is a function of the scores and of how many to keep.")
    return function, names


def size_of(data: Any) -> Any:
    """Return how many examples a batch has: a number where it is known while tracing, else a tensor."""
    first = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    return first.shape[0] if first.shape[0] is not None else ops.shape(first)[0]
