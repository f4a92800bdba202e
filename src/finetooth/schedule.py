"""Schedules: the steps of a training in which something happens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import keras
from keras import ops

from .errors import TuningError


@keras.saving.register_keras_serializable(package="finetooth")
@dataclass(frozen=True)
class Schedule:
    """A function of the step, counted from 0, that is true in the scheduled steps.

    Args:
        start: The first step.
        end: The first step after the last; None for no end.
        every: 1 for all steps in between, `n` for every n-th.
        warmup: Over this number of steps from `start` on, the scheduled ones become gradually more frequent, from none
            to all, evenly spread.

    Raises:
        TuningError: if a number is negative or no integer, or no step is scheduled.

    >>> import finetooth as ft
    >>> middle = ft.Schedule(start=2, end=8, every=3)
    >>> [step for step in range(10) if middle(step)]
    [2, 5]
    """

    start: int = 0
    end: int | None = None
    every: int = 1
    warmup: int = 0

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("end", 0), ("every", 1), ("warmup", 0)):
            value = getattr(self, name)
            if (value is not None or name != "end") and (type(value) is not int or value < least):
                raise TuningError(f"{name} is a number of steps, {least} or more; received {value!r}.")
        if self.end is not None and self.end <= self.start:
            raise TuningError(f"The schedule is empty: its end is step {self.end} and its start {self.start}.")

    def __call__(self, step: Any) -> Any:
        """Return a boolean scalar, a tensor of the backend. `step` may be a tensor, also while a function is traced."""
        after = ops.cast(step, "int32") - self.start
        meant = ops.logical_and(after >= 0, after % self.every == 0)
        if self.end is not None:
            meant = ops.logical_and(meant, after < self.end - self.start)
        if self.warmup:
            # With chance t / warmup at step t, t² / (2 warmup) steps are due by then: one happens where that passes a
            # whole number. In floats, which count far enough: beyond the warm-up all steps are meant.
            now = ops.minimum(ops.cast(after, "float32"), float(self.warmup))
            due, due_next = (ops.floor(t * t / (2.0 * self.warmup)) for t in (now, now + 1.0))
            meant = ops.logical_and(meant, ops.logical_or(after >= self.warmup, due_next > due))
        return meant

    def get_config(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Schedule:
        return cls(**config)
