"""What is measured: models, the part of each that trains, and the ways to train it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np

import finetooth as ft
from finetooth import bits
from finetooth.naming import weights_by_path

L = keras.layers


class MaskedAdam(keras.optimizers.Adam):
    """The popular recipe: multiply each gradient by a mask of zeros and ones."""

    masks: dict[str, np.ndarray] = {}

    def apply(self, grads, trainable_variables=None):
        variables = trainable_variables or self._trainable_variables
        grads = [
            g * keras.ops.cast(self.masks[v.path], g.dtype) if v.path in self.masks else g * 0
            for g, v in zip((keras.ops.convert_to_tensor(g) for g in grads), variables)
        ]
        super().apply(grads, trainable_variables)


class Contender:
    """A compiled model, its data, and what it must not move."""

    def __init__(self, model: keras.Model, optimizer, data, loss: str, frozen: ft.Selection | None, tuning=None):
        self.model, self.data, self.frozen, self.tuning = model, data, frozen, tuning
        self.before = {path: np.array(bits.read(v)) for path, v in weights_by_path(model).items()} if frozen else {}
        model.compile(optimizer, loss)

    def fit(self) -> None:
        x, y, batch = self.data
        self.model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)

    def state(self) -> int:
        """The elements of the optimizer's state."""
        return sum(int(np.prod(v.shape)) for v in self.model.optimizer.variables)

    def moved(self) -> int | None:
        """How many weights outside the part have changed any bit; None where all of them are meant to."""
        if self.frozen is None:
            return None
        after = {path: bits.read(v) for path, v in weights_by_path(self.model).items() if path in self.before}
        return sum(
            int((bits.differing(self.before[p], after[p]) & region.mask()).sum()) for p, region in self.frozen.items()
        )


@dataclass(frozen=True)
class Workload:
    name: str
    steps: int
    contenders: dict[str, Callable[[], Contender]]


def workload(name: str, make: Callable[[], keras.Model], data, what, loss: str = "mse", lora: bool = True) -> Workload:
    """The contenders every workload has: full training, masked gradients, LoRA, biases only, and finetooth."""
    steps = len(data[1]) // data[2]
    adam = keras.optimizers.Adam

    def full():
        return Contender(make(), adam(1e-4), data, loss, None)

    def masked():
        model = make()
        part = ft.select(model, *what)
        optimizer = MaskedAdam(1e-4)
        optimizer.masks = {weights_by_path(model)[p].path: r.mask() for p, r in part.items()}
        return Contender(model, optimizer, data, loss, ~part)

    def with_lora():
        model = make()
        for layer in model.layers:
            if hasattr(layer, "enable_lora"):
                layer.enable_lora(8)
        return Contender(model, adam(1e-4), data, loss, None)

    def biases():
        model = make()
        for v in model.trainable_variables:
            v.trainable = v.name == "bias"
        return Contender(model, adam(1e-4), data, loss, None)

    def ours(reading="auto"):
        model = make()
        part = ft.select(model, *what)
        tuning = ft.tune(model, part, reading=reading)
        return Contender(model, adam(1e-4), data, loss, ~part, tuning)

    contenders = {"finetooth": ours, "finetooth, composed read": lambda: ours("composed"), "full Adam": full}
    contenders |= {"masked gradient + Adam": masked, "biases only (floor)": biases}
    if lora:
        contenders["Keras enable_lora(8)"] = with_lora
    return Workload(name, steps, contenders)


def stack(width: int, depth: int) -> keras.Model:
    return keras.Sequential([keras.Input((width,)), *(L.Dense(width, "relu", name=f"d{i}") for i in range(depth))])


def table(rows: int) -> keras.Model:
    tokens = keras.Input((20,), dtype="int32")
    x = L.GlobalAveragePooling1D()(L.Embedding(rows, 768, name="table")(tokens))
    for i in range(4):
        x = L.Dense(768, "relu", name=f"d{i}")(x)
    return keras.Model(tokens, x)


def top(model: keras.Model) -> keras.Model:
    for layer in model.layers[:-1]:
        layer.trainable = False
    return model


def numbers(steps: int, batch: int, width: int):
    rng = np.random.default_rng(0)
    return rng.normal(size=(steps * batch, width)).astype("float32"), np.zeros((steps * batch, width), "float32"), batch


def tokens(steps: int, batch: int, rows: int):
    rng = np.random.default_rng(0)
    return rng.integers(0, rows, (steps * batch, 20)), np.zeros((steps * batch, 768), "float32"), batch


def truncated() -> Workload:
    """A part of the last of eight layers: what lies below takes no backward pass."""
    data = numbers(30, 64, 1024)
    base = workload(
        "part of the last of 8 x Dense(1024), batch 64", lambda: stack(1024, 8), data, ["d7/kernel[:, :64]"]
    )
    kept = {name: base.contenders[name] for name in ("finetooth", "full Adam")}

    def frozen():
        return Contender(top(stack(1024, 8)), keras.optimizers.Adam(1e-4), data, "mse", None)

    return Workload(base.name, base.steps, {**kept, "trainable=False below": frozen})


def everything() -> Workload:
    """All of it selected: plain training, to the bit."""
    base = workload("everything: 4 x Dense(1024), batch 64", lambda: stack(1024, 4), numbers(30, 64, 1024), ["**"])
    return Workload(base.name, base.steps, {name: base.contenders[name] for name in ("finetooth", "full Adam")})


SCATTERED = np.s_[:, sorted(np.random.default_rng(0).choice(1024, 51, False))]
WORKLOADS = [
    workload(
        "256 x 256 of each of 4 x Dense(1024), batch 64",
        lambda: stack(1024, 4),
        numbers(30, 64, 1024),
        ["*/kernel[256:512, 256:512]"],
    ),
    workload(
        "5% of the columns, scattered, of 4 x Dense(1024), batch 256",
        lambda: stack(1024, 4),
        numbers(10, 256, 1024),
        [("*/kernel", SCATTERED)],
    ),
    workload(
        "10 of 32,000 x 768 rows + 4 x Dense(768), batch 128",
        lambda: table(32_000),
        tokens(10, 128, 32_000),
        ["table/embeddings[31990:]"],
        lora=False,
    ),
    truncated(),
    everything(),
]
