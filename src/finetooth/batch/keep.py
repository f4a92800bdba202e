"""Chooser: from the losses of a batch to what is kept of it, by a score and a rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import keras
from keras import ops

from ..errors import BatchError
from .memory import Ledger
from .rules import remembered

FOR_SCORES = ("losses", "losses_of", "predictions", "x", "y", "sample_weight")
FOR_RULES = ("history", "labels", "predictions", "seed", "x", "y")


class Chooser:
    """Knows how many to keep, what their score is, and the rule by which scores decide."""

    def __init__(self, keep: float, rule: Callable[..., Any], score: Callable[..., Any] | None):
        if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
            raise BatchError(f"keep is the share of a batch to train on, above 0 and at most 1; received {keep!r}.")
        self.keep = float(keep)
        self._score, self._names = _named(score or _losses, FOR_SCORES, 0)
        self._rule, self._rule_names = _named(rule, FOR_RULES, 2)

    def count(self, number: Any) -> Any:
        """How many of a number are kept: the nearest to the share, one at least. A tensor where the number is one."""
        if isinstance(number, int):
            return max(1, int(number * self.keep + 0.5))
        return ops.maximum(1, ops.cast(ops.floor(ops.cast(number, "float32") * self.keep + 0.5), "int32"))

    def scores(self, known: Mapping[str, Any]) -> Any:
        """One number each; `known` holds what scores can be computed from, by name."""
        return ops.cast(self._score(**{name: known[name] for name in self._names}), "float32")

    def choose(self, scores: Any, k: Any, ledger: Ledger, known: Mapping[str, Any]) -> tuple[Any, Any]:
        """The indices of those kept, and weights for them if the rule gives any, or None."""
        known = {**known, "labels": known["y"], "seed": ledger.seeds, "history": ledger.history.value}
        found = self._rule(scores, k, **{name: known[name] for name in self._rule_names})
        if "history" in self._rule_names:
            ledger.history.assign(remembered(known["history"], scores))
        return found if isinstance(found, tuple) else (found, None)


def _losses(losses: Any) -> Any:
    return losses


def _named(function: Callable[..., Any], known: tuple[str, ...], given: int) -> tuple[Callable[..., Any], list[str]]:
    """The function and the names of what it wants to be told, beyond the first arguments that it is always given."""
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
                f"{parameter.name!r} is not known to a function that chooses examples. It is told of what it names "
                f"among {', '.join(known)}."
            )
    if len(parameters) < given:
        raise BatchError("A rule is a function of the scores and of how many to keep.")
    return function, names


def size_of(data: Any) -> Any:
    """How many examples a batch has: a number where it is known, else a tensor."""
    first = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    return first.shape[0] if first.shape[0] is not None else ops.shape(first)[0]
