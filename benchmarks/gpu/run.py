"""A contender, ready to train, and the ways to prepare a Keras model that make one."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np

import finetooth as ft
from finetooth.keras_internals.weights import weights_by_path
from finetooth.regions.region import Region

backend = importlib.import_module(f"gpu.on_{keras.backend.backend()}")

Prepare = Callable[[keras.Model], ft.Selection | None]  # gives what may move; None: everything


class Moved(NamedTuple):
    """How many elements changed any bit since the start: of those that may, and of those that may not."""

    trained: int
    frozen: int


@dataclass(frozen=True)
class Run:
    """One way to train a model, ready for its first step."""

    step: Callable[[], Any]  # one training step; gives what to wait for
    given: int  # elements, to the optimizer
    freezes: bool  # whether it promises to leave anything alone
    moved: Callable[[], Moved]
    peak: int | None = None  # bytes, where the compiler knows; otherwise they are measured


@dataclass(frozen=True)
class Task:
    """What the contenders of a group have in common."""

    data: Any  # input and target, on the device
    loss: Callable[[Any, Any], Any]
    optimizer: type = keras.optimizers.Adam

    def run(
        self, make: Callable[[], keras.Model], prepare: Prepare, optimizer: type | None = None, masked: bool = False
    ) -> Run:
        """Train a new model as prepared; `masked` multiplies the gradients by what `prepare` says may move."""
        keras.config.set_dtype_policy("bfloat16")  # here, as `clear_session` forgets it
        keras.utils.set_random_seed(0)
        model = make()
        weights = weights_by_path(model)
        before = {path: backend.bits(variable.value) for path, variable in weights.items()}
        may_move = prepare(model)
        steps = backend.Steps(model, self.data, self.loss, optimizer or self.optimizer, _masks(model, may_move, masked))

        def moved() -> Moved:
            steps.settle()
            now = ((path, backend.bits(variable.value)) for path, variable in weights.items())
            return count_moved(before, now, ft.select(model, "**") if may_move is None else may_move)

        return Run(steps.step, elements(model.trainable_variables), may_move is not None, moved, steps.peak)


def _masks(model: keras.Model, may_move: ft.Selection | None, masked: bool) -> list[Any] | None:
    """A tensor of zeros and ones for each variable that trains, where gradients are to be masked."""
    if not masked:
        return None
    paths = {id(variable): path for path, variable in weights_by_path(model).items()}
    regions = [may_move[paths[id(variable)]] for variable in model.trainable_variables]
    tensors = {region: keras.ops.convert_to_tensor(_mask(region), "bfloat16") for region in set(regions)}
    return [tensors[region] for region in regions]


def _mask(region: Region) -> np.ndarray:
    """As small as it can be: with one entry along axes on which everything is selected."""
    selected = zip(region.compact_shape, region.shape)  # of points, all in one axis
    return region.mask()[tuple(slice(0, 1) if size == full else slice(None) for size, full in selected)]


def count_moved(
    before: Mapping[str, np.ndarray], now: Iterable[tuple[str, np.ndarray]], may_move: Mapping[str, Region]
) -> Moved:
    trained = frozen = 0
    for path, value in now:
        differing = before[path] != value
        every = int(np.count_nonzero(differing))
        inside = int(np.count_nonzero(differing & may_move[path].mask())) if every and path in may_move else 0
        trained, frozen = trained + inside, frozen + every - inside
    return Moved(trained, frozen)


def elements(tensors: Any) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def everything(model: keras.Model) -> None:
    """Plain training."""


def only(*names: str) -> Prepare:
    """Train the variables of these names, and freeze the others as Keras does."""

    def prepare(model: keras.Model) -> ft.Selection:
        for variable in model.trainable_variables:
            variable.trainable = variable.name in names
        return ft.select(model, lambda variable: variable.name in names)

    return prepare


def tuned(*what: Any, layer_rules: bool = True) -> Prepare:
    """Let finetooth train a selection: what `ft.select` takes, or a function of the model that gives such things."""

    def prepare(model: keras.Model) -> ft.Selection:
        selection = ft.select(model, *chosen(model, what))
        ft.tune(model, selection, layer_rules=layer_rules)
        return selection

    return prepare


def partly(*what: Any) -> Prepare:
    """Train the variables of which something is selected, as wholes; for gradients that are masked."""

    def prepare(model: keras.Model) -> ft.Selection:
        selection = ft.select(model, *chosen(model, what))
        weights = weights_by_path(model)
        for path, variable in weights.items():
            variable.trainable = path in selection
        return selection

    return prepare


def chosen(model: keras.Model, what: tuple[Any, ...]) -> list[Any]:
    return [item for given in what for item in (given(model) if callable(given) else [given])]
