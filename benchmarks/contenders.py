"""The ways to train a part of a model that every backend has, behind one small interface."""

from __future__ import annotations

import math
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np

import finetooth as ft
from finetooth.keras_internals import private as keras_private
from finetooth.keras_internals.weights import to_numpy, weights_by_path
from finetooth.regions import bits
from finetooth.regions.region import Region

RATE = 1e-4
EVERYTHING = None  # in place of what may move: no promise to freeze anything


@dataclass(frozen=True, eq=False)
class Data:
    """Examples in memory, and how many make a batch."""

    x: np.ndarray
    y: np.ndarray
    batch: int

    @property
    def steps(self) -> int:
        return len(self.x) // self.batch

    def share(self, fraction: float) -> Data:
        """The first so many batches, for contenders whose steps are so slow that a few tell as much."""
        count = max(1, round(fraction * self.steps)) * self.batch
        return Data(self.x[:count], self.y[:count], self.batch)

    @cached_property
    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        cuts = [slice(i * self.batch, (i + 1) * self.batch) for i in range(self.steps)]
        return [(self.x[cut], self.y[cut]) for cut in cuts]


def initial(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """The value every contender's weight of this path starts with, on every backend: made anew, so never kept."""
    if len(shape) == 1:
        return np.full(shape, 1.0 if path.endswith("gamma") else 0.0, "float32")
    size = math.prod(shape)
    limit = math.sqrt(6 * shape[-1] / size)
    rng = np.random.default_rng(zlib.crc32(path.encode()))
    values = rng.uniform(-limit, limit, min(size, 2**22)).astype("float32")
    return np.resize(values, shape)  # a large table repeats itself, to be made in no time


class Contender(ABC):
    """One way to train a model, ready to run.

    `steps` is the number of steps in its epoch. `may_move` is what it may change, by path; everything else it promises
    to freeze. `once` is the time in seconds of work that is done once and that a user of this way waits for, on top of
    building and compiling.
    """

    steps: int
    may_move: Mapping[str, Region] | None
    once: float | None = None

    @abstractmethod
    def epoch(self) -> float:
        """Train on all the data once, wait for the result, and say how many seconds the steps took."""

    @abstractmethod
    def given(self) -> int:
        """How many elements the optimizer is given to train."""

    @abstractmethod
    def state(self) -> int:
        """How many elements the optimizer keeps beside them; counters are not counted."""

    @abstractmethod
    def weights(self) -> Mapping[str, np.ndarray]:
        """The weights the model began with, by path, as they are now."""

    def moved(self) -> int | None:
        """How many elements that are to be frozen have changed any bit since the start."""
        if self.may_move is EVERYTHING:
            return None
        count = 0
        for path, now in self.weights().items():
            differing = bits.differing(initial(path, now.shape), np.ascontiguousarray(now))
            if path in self.may_move:
                differing &= ~self.may_move[path].mask()
            count += int(np.count_nonzero(differing))
        return count


def elements(arrays: Any) -> int:
    """How many elements tensors or variables hold together, scalars apart."""
    return sum(math.prod(array.shape) for array in arrays if len(array.shape))


def forget_peak() -> None:
    """Count peak memory from here, where the system can: making a model and its initial weights is not training."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def started(make: Callable[[], keras.Model]) -> tuple[keras.Model, dict[str, keras.Variable]]:
    """A model with the initial weights, and its weights by path."""
    model = make()
    weights = weights_by_path(model)
    for path, variable in weights.items():
        variable.assign(initial(path, tuple(variable.shape)))
    forget_peak()
    return model, weights


class Stopwatch(keras.callbacks.Callback):
    """The seconds from the beginning of an epoch to its end, without what a call of `fit` does before it."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seconds = -time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds += time.perf_counter()


class Fit(Contender):
    """A Keras model trained with stock `compile` and `fit`."""

    def __init__(self, model: keras.Model, weights: Mapping[str, keras.Variable], data: Data, may_move: Any):
        self.model, self.data, self.may_move = model, data, may_move
        self.steps, self._weights = data.steps, weights

    def compile(self, loss: Any, optimizer: keras.optimizers.Optimizer | None = None, **options: Any) -> Fit:
        self.model.compile(optimizer or keras.optimizers.Adam(RATE), loss, **options)
        return self

    def epoch(self) -> float:
        watch, data = Stopwatch(), self.data
        self.model.fit(data.x, data.y, batch_size=data.batch, shuffle=False, verbose=0, callbacks=[watch])
        return watch.seconds

    def given(self) -> int:
        return elements(self.model.trainable_variables)

    def state(self) -> int:
        return elements(self.model.optimizer.variables)

    def weights(self) -> Mapping[str, np.ndarray]:
        return {path: to_numpy(variable) for path, variable in self._weights.items()}


class Loop(Contender):
    """Training steps written with the backend's own means, one after the other on batches that lie ready."""

    def __init__(self, step: Callable[[Any, Any], Any], batches: list, wait: Callable[[Any], None]):
        self.steps, self._step, self._batches, self._wait = len(batches), step, batches, wait

    def holding(
        self,
        given: int,
        state: Callable[[], int],
        weights: Callable[[], Mapping[str, np.ndarray]],
        may_move: Mapping[str, Region] | None,
    ) -> Loop:
        """The same loop, which knows what it holds."""
        self._given, self._state, self._weights, self.may_move = given, state, weights, may_move
        return self

    def epoch(self) -> float:
        start, result = time.perf_counter(), None
        for x, y in self._batches:
            result = self._step(x, y)
        self._wait(result)
        return time.perf_counter() - start

    def given(self) -> int:
        return self._given

    def state(self) -> int:
        return self._state()

    def weights(self) -> Mapping[str, np.ndarray]:
        return self._weights()


@dataclass(frozen=True)
class Task:
    """A model and the loss it is trained with: what the contenders of a workload have in common."""

    make: Callable[[], keras.Model]
    loss: Any

    def finetooth(self, data: Data, *what: Any, layer_rules: bool = True, **options: Any) -> Fit:
        model, weights = started(self.make)
        part = ft.select(model, *what)
        ft.tune(model, part, layer_rules=layer_rules)
        return Fit(model, weights, data, dict(part.items())).compile(self.loss, **options)

    def cached(self, data: Data, *what: Any) -> Fit:
        """The layers below the part run once, before training, and what they give is what is trained on."""
        model, weights = started(self.make)
        part = ft.select(model, *what)
        split = ft.tune(model, part).split()
        start = time.perf_counter()
        features = split.features(data.x, batch_size=data.batch, verbose=0)
        seconds = time.perf_counter() - start
        contender = Fit(split.upper, weights, Data(features, data.y, data.batch), dict(part.items()))
        contender.once = seconds
        return contender.compile(self.loss)

    def full(self, data: Data, **options: Any) -> Fit:
        model, weights = started(self.make)
        return Fit(model, weights, data, EVERYTHING).compile(self.loss, **options)

    def frozen(self, data: Data, kept: Callable[[keras.Variable, str], bool], **options: Any) -> Fit:
        """Whole variables frozen with `trainable=False`, as stock Keras does it, all but those to be kept."""
        model, weights = started(self.make)
        for path, variable in weights.items():
            variable.trainable = variable.trainable and kept(variable, path)
        part = ft.select(model, lambda variable: variable.trainable)
        return Fit(model, weights, data, dict(part.items())).compile(self.loss, **options)

    def biases(self, data: Data, **options: Any) -> Fit:
        """The floor: the least a step can do when every layer trains something."""
        return self.frozen(data, lambda variable, _: variable.name == "bias", **options)

    def masked(self, data: Data, *what: Any, optimizer: Any = keras.optimizers.Adam, **options: Any) -> Fit:
        """The popular recipe: freeze whole variables where that is enough, else mask their gradient."""
        model, weights = started(self.make)
        part = ft.select(model, *what)
        for path, variable in weights.items():
            variable.trainable = path in part
        masks = {weights[path].path: keras.ops.convert_to_tensor(r.mask(), "float32") for path, r in part.items()}
        return Fit(model, weights, data, dict(part.items())).compile(
            self.loss, _masking(optimizer, masks)(RATE), **options
        )

    def lora(self, data: Data, *what: Any, rank: int = 8) -> Fit:
        """Keras' own LoRA, on the layers that hold the part; nothing but its factors is trained."""
        model, weights = started(self.make)
        part = {id(weights[path]) for path in ft.select(model, *what)}
        for layer in keras_private.layers_of(model):
            if hasattr(layer, "enable_lora") and part & {id(v) for v in keras_private.own_variables(layer)}:
                layer.enable_lora(rank)
        for variable in weights.values():
            variable.trainable = False
        return Fit(model, weights, data, {}).compile(self.loss)


def _masking(optimizer: Any, masks: Mapping[str, Any]) -> Any:
    """An optimizer class that multiplies the gradients of these variables by a mask of zeros and ones."""

    class Masking(optimizer):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            variables = trainable_variables or self._trainable_variables
            masked = [keras.ops.convert_to_tensor(g) * masks[v.path] for g, v in zip(grads, variables)]
            return super().apply(masked, trainable_variables)

    return Masking
