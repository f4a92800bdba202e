"""Scores of examples other than their loss: what `selective_backprop(score=...)` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from ..errors import BatchError

Tensor = Any


def entropy(predictions: Tensor, from_logits: bool = False) -> Tensor:
    """How undecided each prediction is: its entropy. A score that needs no labels."""
    logs = _log_probabilities(predictions, from_logits)
    return -ops.sum(ops.exp(logs) * logs, axis=-1)


def margin(predictions: Tensor, from_logits: bool = False) -> Tensor:
    """How undecided each prediction is: minus the difference of its two highest probabilities."""
    best = ops.top_k(ops.exp(_log_probabilities(predictions, from_logits)), 2)[0]
    return best[..., 1] - best[..., 0]


class Excess:
    """A score: by how much each loss is above that of a reference model, which knows what cannot be learnt.

    The reference is a model with the same outputs, or any function from inputs to losses.
    """

    def __init__(self, reference: keras.Model | Callable[[Any], Any]):
        self.reference = reference

    def __call__(self, losses: Tensor, losses_of: Callable[[Any], Any], x: Any) -> Tensor:
        if not isinstance(self.reference, keras.Model):
            return losses - self.reference(x)
        return losses - losses_of(ops.stop_gradient(self.reference(x, training=False)))


@dataclass(frozen=True)
class Stale:
    """A score that is kept, and used until it is `steps` old: a batch is scored if it holds an older one.

    Examples are known by numbers from 0 to `examples`, which are among the inputs: under the key `ids`, or given by a
    function of the inputs. While scores are young, metrics are those of the kept examples.
    """

    ids: str | Callable[[Any], Any]
    examples: int
    steps: int
    score: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("examples", "steps"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise BatchError(f"{name} is a number, 1 or more; received {getattr(self, name)!r}.")

    def of(self, x: Any) -> Tensor:
        """The numbers of the examples in a batch."""
        if callable(self.ids):
            found = self.ids(x)
        elif isinstance(x, dict) and self.ids in x:
            found = x[self.ids]
        else:
            raise BatchError(f"The inputs have no {self.ids!r}: fit a dictionary that has the examples' numbers there.")
        return ops.reshape(ops.cast(found, "int32"), (-1,))


def _log_probabilities(predictions: Tensor, from_logits: bool) -> Tensor:
    predictions = ops.cast(ops.convert_to_tensor(predictions), "float32")
    if len(predictions.shape) < 2 or predictions.shape[-1] < 2:
        raise BatchError(
            f"Predictions are one row of two or more classes per example; received shape {tuple(predictions.shape)}."
        )
    return ops.log_softmax(predictions) if from_logits else ops.log(ops.maximum(predictions, 1e-30))
