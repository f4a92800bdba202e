"""What is measured: models, the part of each that trains, and the contenders that make sense for it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from contenders import Contender, Data, Loop, Task, started

import finetooth as ft

L = keras.layers
BACKEND = keras.backend.backend()
TENSORFLOW = BACKEND == "tensorflow"
native = importlib.import_module(f"native_{BACKEND}")
Make = Callable[[Data], Contender]


@dataclass(frozen=True)
class Workload:
    """Contenders by name, all trained on the same data. The first is the one that others are compared to.

    `data` makes so many steps of it. `quick` names the contenders of a quick run, `memory` those whose peak memory is
    measured too.
    """

    name: str
    title: str
    steps: int
    data: Callable[[int], Data]
    contenders: dict[str, Make]
    quick: Sequence[str] = ()
    memory: Sequence[str] = ()


def all_workloads() -> list[Workload]:
    return [slices(), transformers(), rows(), scaling(), top(), everything(), points(), convolutions()]


def slices(width: int = 1024, depth: int = 4) -> Workload:
    task = dense_stack(width, depth)
    low, high = width // 4, width // 2
    what = f"*/kernel[{low}:{high}, {low}:{high}]"
    contenders: dict[str, Make] = {
        "finetooth": lambda data: task.finetooth(data, what),
        "finetooth, own loop": lambda data: own_loop(task, data, what),
        "finetooth, composed read": lambda data: task.finetooth(data, what, layer_rules=False),
        "full": task.full,
        "masked gradient": lambda data: task.masked(data, what),
        "masked gradient, AdamW": lambda data: task.masked(data, what, optimizer=keras.optimizers.AdamW),
        "Keras enable_lora(8)": lambda data: task.lora(data, what),
        "biases only (floor)": task.biases,
        "hand-written floor": lambda data: native.slice_floor(depth, width, low, high, data),
    }
    if TENSORFLOW:  # which `fit` compiles with XLA only when asked to, on a CPU
        contenders |= {
            "finetooth, XLA": lambda data: task.finetooth(data, what, jit_compile=True),
            "masked gradient, XLA": lambda data: task.masked(data, what, jit_compile=True),
            "biases only, XLA (floor)": lambda data: task.biases(data, jit_compile=True),
        }
    quick = ("finetooth", "full", "masked gradient", "Keras enable_lora(8)", "biases only (floor)")
    quick += ("hand-written floor", "factored LoRA, r=8", "optax, masked gradient")
    return Workload(
        "slice",
        f"[{low}:{high}, {low}:{high}] of each of {depth} x Dense({width}), batch 64",
        80,
        numbers(width, 64),
        contenders,
        quick,
        memory=(*quick, "finetooth, composed read", "PEFT LoRA, r=8", "PEFT SHiRA, as many"),
    )


def transformers(width: int = 256, tokens: int = 128) -> Workload:
    task = transformer(4, width, tokens)
    together, scattered = five_percent(width, False), five_percent(width, True)
    return Workload(
        "transformer",
        f"5% of the columns of every kernel; 4 layers of width {width}, {tokens} tokens, batch 16",
        6,
        texts(tokens, 16),
        {
            "finetooth": lambda data: task.finetooth(data, *together),
            "finetooth, scattered": lambda data: task.finetooth(data, *scattered),
            "finetooth, composed read": lambda data: task.finetooth(data, *together, layer_rules=False),
            "full": lambda data: task.full(data.share(0.5)),
            "masked gradient": lambda data: task.masked(data.share(0.5), *together),
            "Keras enable_lora(8)": lambda data: task.lora(data.share(0.5), *together),
            "biases only (floor)": task.biases,
        },
        ("finetooth", "full", "biases only (floor)"),
        memory=("finetooth", "full", "Keras enable_lora(8)", "biases only (floor)"),
    )


def rows(count: int = 32_000, width: int = 768) -> Workload:
    task = table(count, width)
    what = "table/embeddings[:10]"
    quick = ("finetooth", "full", "masked gradient", "frozen table, biases only (floor)", "PEFT TrainableTokens")
    return Workload(
        "rows",
        f"10 of {count:,} x {width} embedding rows under 4 x Dense({width}), batch 128 of 20 tokens",
        40,
        tokens_of(count, width),
        {
            "finetooth": lambda data: task.finetooth(data, what),
            "finetooth, own loop": lambda data: own_loop(task, data, what),
            "full": lambda data: task.full(data.share(0.2)),
            "masked gradient": lambda data: task.masked(data.share(0.2), what),
            "Keras enable_lora(8)": lambda data: task.lora(data.share(0.2), what),
            "frozen table, biases only (floor)": task.biases,
        },
        quick,
        memory=(*quick, "Keras enable_lora(8)", "SparseAdam, rows that occur"),
    )


def scaling(counts: Sequence[int] = (32_000, 1_000_000), width: int = 768) -> Workload:
    """The same ten rows of larger and larger tables. Tables that would fill the memory are left out."""
    fitting = [count for count in counts if 6 * 4 * count * width < available_memory()]

    def tuned(count: int) -> Make:
        task = table(count, width)
        return lambda data: task.finetooth(Data(data.x % count, data.y, data.batch), "table/embeddings[:10]")

    return Workload(
        "scaling",
        f"10 of so many x {width} embedding rows under 4 x Dense({width}), batch 128 of 20 tokens",
        40,
        tokens_of(max(counts), width),
        {f"finetooth, {count:,} rows": tuned(count) for count in fitting},
    )


def top(width: int = 256, tokens: int = 128) -> Workload:
    task = transformer(6, width, tokens)
    what = ("b4_*/**", "b5_*/**", "head/*")
    return Workload(
        "top",
        f"the top 2 of 6 layers of width {width}, {tokens} tokens, batch 16",
        6,
        texts(tokens, 16),
        {
            "finetooth": lambda data: task.finetooth(data, *what),
            "finetooth, cached prefix": lambda data: task.cached(data, *what),
            "trainable=False below": lambda data: task.frozen(
                data, lambda _, path: path.startswith(("b4_", "b5_", "head"))
            ),
            "full": lambda data: task.full(data.share(0.5)),
        },
    )


def everything(width: int = 1024, depth: int = 4) -> Workload:
    task = dense_stack(width, depth)
    return Workload(
        "everything",
        f"all of {depth} x Dense({width}), batch 64",
        80,
        numbers(width, 64),
        {"finetooth": lambda data: task.finetooth(data, "**"), "plain fit": task.full},
    )


def points(width: int = 1024, depth: int = 4) -> Workload:
    task = dense_stack(width, depth)
    percent, tenth = ([("*/kernel", scattered_mask((width, width), share))] for share in (0.01, 0.001))
    return Workload(
        "points",
        f"single elements, at random, of each of {depth} x Dense({width}), batch 64",
        60,
        numbers(width, 64),
        {
            "finetooth, 1%": lambda data: task.finetooth(data, *percent),
            "finetooth, 0.1%": lambda data: task.finetooth(data, *tenth),
            "full": task.full,
            "masked gradient, 1%": lambda data: task.masked(data, *percent),
            "masked gradient, 0.1%": lambda data: task.masked(data, *tenth),
            "biases only (floor)": task.biases,
        },
    )


def convolutions(side: int = 16, channels: int = 128) -> Workload:
    task = Task(functools.partial(_convolutions, side, channels), "mse")
    what = f"*/kernel[..., :{channels // 8}]"
    return Workload(
        "convolution",
        f"1/8 of the outputs of each of 3 x Conv2D({channels}, 3) on {side} x {side}, batch 16",
        6,
        images(side, channels),
        {
            "finetooth": lambda data: task.finetooth(data, what),
            "finetooth, composed read": lambda data: task.finetooth(data, what, layer_rules=False),
            "full": task.full,
            "masked gradient": lambda data: task.masked(data, what),
            "biases only (floor)": task.biases,
        },
    )


def own_loop(task: Task, data: Data, *what: Any) -> Loop:
    """Finetooth in a loop of the backend's own, to compare with others that run in one."""
    model, weights = started(task.make)
    part = ft.select(model, *what)
    ft.tune(model, part)
    return native.own_loop(model, weights, data, dict(part.items()))


def dense_stack(width: int, depth: int) -> Task:
    return Task(functools.partial(_stack, width, depth), "mse")


def transformer(depth: int, width: int, tokens: int) -> Task:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Task(functools.partial(_transformer, depth, width, tokens), loss)


def table(count: int, width: int) -> Task:
    return Task(functools.partial(_table, count, width), "mse")


def _stack(width: int, depth: int) -> keras.Model:
    return keras.Sequential([keras.Input((width,)), *(L.Dense(width, "relu", name=f"d{i}") for i in range(depth))])


def _transformer(depth: int, width: int, tokens: int) -> keras.Model:
    inputs = keras.Input((tokens,), dtype="int32")
    x = L.Embedding(2000, width, name="tokens")(inputs)
    for b in (f"b{i}" for i in range(depth)):
        normal = L.LayerNormalization(name=f"{b}_before_attention")(x)
        x = L.Add()([x, L.MultiHeadAttention(4, width // 4, name=f"{b}_attention")(normal, normal)])
        normal = L.LayerNormalization(name=f"{b}_before_ffn")(x)
        inner = L.Dense(4 * width, "relu", name=f"{b}_up")(normal)
        x = L.Add()([x, L.Dense(width, name=f"{b}_down")(inner)])
    return keras.Model(inputs, L.Dense(10, name="head")(L.GlobalAveragePooling1D()(x)))


def _table(count: int, width: int) -> keras.Model:
    tokens = keras.Input((20,), dtype="int32")
    x = L.Embedding(count, width, embeddings_initializer="zeros", name="table")(tokens)
    x = L.GlobalAveragePooling1D()(x)
    for i in range(4):
        x = L.Dense(width, "relu", name=f"d{i}")(x)
    return keras.Model(tokens, x)


def _convolutions(side: int, channels: int) -> keras.Model:
    layers = [L.Conv2D(channels, 3, padding="same", activation="relu", name=f"c{i}") for i in range(3)]
    return keras.Sequential([keras.Input((side, side, channels)), *layers])


def five_percent(width: int, scattered: bool) -> list[tuple[str, Any]]:
    """5% of the last axis of every kernel but the head's: the first ones, or as many here and there."""
    lengths = {f"*_attention/{name}": width // 4 for name in ("query", "key", "value")}
    lengths |= {"*_attention/attention_output": width, "*_up": 4 * width, "*_down": width}
    rng = np.random.default_rng(0)
    parts: list[tuple[str, Any]] = []
    for layer, length in lengths.items():
        count = max(2, round(0.05 * length))
        some = sorted(rng.choice(length, count, replace=False).tolist())
        parts.append((f"{layer}/kernel", (..., some) if scattered else (..., slice(count))))
    return parts


def scattered_mask(shape: tuple[int, ...], share: float) -> np.ndarray:
    return np.random.default_rng(0).random(shape) < share


def numbers(width: int, batch: int) -> Callable[[int], Data]:
    def make(steps: int) -> Data:
        x = np.random.default_rng(0).normal(size=(steps * batch, width)).astype("float32")
        return Data(x, np.zeros((steps * batch, width), "float32"), batch)

    return make


def texts(tokens: int, batch: int) -> Callable[[int], Data]:
    def make(steps: int) -> Data:
        rng = np.random.default_rng(0)
        return Data(rng.integers(0, 2000, (steps * batch, tokens)), rng.integers(0, 10, steps * batch), batch)

    return make


def tokens_of(count: int, width: int, batch: int = 128) -> Callable[[int], Data]:
    """Tokens of which one in ten has a row that trains."""

    def make(steps: int) -> Data:
        rng = np.random.default_rng(0)
        x = rng.integers(0, count, (steps * batch, 20))
        x = np.where(rng.random(x.shape) < 0.1, x % 10, x)
        return Data(x, np.zeros((steps * batch, width), "float32"), batch)

    return make


def images(side: int, channels: int, batch: int = 16) -> Callable[[int], Data]:
    def make(steps: int) -> Data:
        shape = (steps * batch, side, side, channels)
        return Data(np.random.default_rng(0).normal(size=shape).astype("float32"), np.zeros(shape, "float32"), batch)

    return make


def available_memory() -> int:
    """Bytes that can be used before the machine swaps; where it does not say, 8 GiB."""
    try:
        with open("/proc/meminfo") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 8 * 2**30
