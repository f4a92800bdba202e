"""What is measured: groups of contenders. The first of each is its floor, the least that a step can cost."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np

import finetooth as ft

from .layers import Lora, PointsDense
from .llama import Shape, llama
from .run import Prepare, Run, Task, backend, everything, only, partly, tuned

L, ops = keras.layers, keras.ops
TORCH = keras.backend.backend() == "torch"


@dataclass(frozen=True)
class Sizes:
    width: int = 4096
    depth: int = 8
    many: int = 8192  # tokens
    few: int = 1024
    lora: int = 16  # rank
    vocabulary: int = 256_000
    embedding: int = 2048
    llama: Shape = field(default_factory=Shape)


TINY = Sizes(
    width=512,
    depth=2,
    many=32,
    few=16,
    lora=4,
    vocabulary=1000,
    embedding=64,
    llama=Shape(layers=2, width=64, heads=4, ffn=160, vocabulary=100, batch=2, tokens=16, rank=4),
)


@dataclass(frozen=True)
class Group:
    """Contenders for one task, by name; `task` puts the data on the device."""

    title: str
    task: Callable[[], Task]
    contenders: Mapping[str, Callable[[Task], Run]]
    steps: int = 20  # in a round
    rounds: int = 5


def groups(sizes: Sizes) -> dict[str, Group]:
    return {
        "dense": dense(sizes, sizes.many),
        "dense-few": dense(sizes, sizes.few),
        "embedding": embedding(sizes),
        "points": points(sizes),
        "llama": decoder(sizes.llama),
    }


def peer(name: str, *args: Any) -> Callable[[Task], Run]:
    """A contender of `peers`, which imports large libraries."""
    return lambda task: getattr(importlib.import_module("gpu.peers"), name)(task, *args)


def keras_run(make: Callable[[], keras.Model], prepare: Prepare, **options: Any) -> Callable[[Task], Run]:
    return lambda task: task.run(make, prepare, **options)


def squared(outputs: Any, _: Any) -> Any:
    """A loss that costs next to nothing."""
    return ops.sum(ops.square(outputs)) / outputs.shape[0]


def normal(count: int, width: int) -> Task:
    x = np.random.default_rng(0).normal(size=(count, width)).astype("float32")
    return Task((ops.convert_to_tensor(x, "bfloat16"), None), squared)


def stack(sizes: Sizes, layer: Callable[[int], L.Layer] | None = None) -> keras.Model:
    layer = layer or (lambda i: L.Dense(sizes.width, "relu", name=f"d{i}"))
    return keras.Sequential([keras.Input((sizes.width,)), *(layer(i) for i in range(sizes.depth))])


def dense(sizes: Sizes, tokens: int) -> Group:
    model = partial(stack, sizes)
    part = round(0.05 * sizes.width)
    rows, columns = f"*/kernel[:{part}]", f"*/kernel[:, :{part}]"
    scattered = np.sort(np.random.default_rng(0).choice(sizes.width, part, replace=False))
    with_lora = partial(stack, sizes, lambda i: Lora(L.Dense(sizes.width, name=f"d{i}"), sizes.lora, "relu"))
    return Group(
        f"{sizes.depth} x Dense({sizes.width}), bfloat16, {tokens:,} tokens; LoRA: r={sizes.lora}",
        partial(normal, tokens, sizes.width),
        {
            "biases only (floor)": keras_run(model, only("bias")),
            "finetooth, 5% rows": keras_run(model, tuned(rows)),
            "finetooth, 5% columns": keras_run(model, tuned(columns)),
            "finetooth, 5% columns, scattered": keras_run(model, tuned(("*/kernel", np.s_[:, scattered]))),
            "finetooth, 5% columns, composed": keras_run(model, tuned(columns, layer_rules=False)),
            "factored LoRA": keras_run(with_lora, only("down", "up")),
            "full Adam": keras_run(model, everything),
            "masked gradient + Adam": keras_run(model, partly(columns), masked=True),
        },
    )


def embedding(sizes: Sizes) -> Group:
    outputs, rows = 16, list(range(sizes.vocabulary - 10, sizes.vocabulary))
    what = (f"table/embeddings[{rows[0]}:]", "head/*")

    def model() -> keras.Model:
        tokens = keras.Input((), dtype="int32")
        vectors = L.Embedding(sizes.vocabulary, sizes.embedding, name="table")(tokens)
        return keras.Model(tokens, L.Dense(outputs, name="head")(vectors))

    def task() -> Task:
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, rows[0], sizes.many)
        chosen = rng.random(sizes.many) < 0.05
        tokens[chosen] = rng.choice(rows, chosen.sum())
        return Task((ops.convert_to_tensor(tokens, "int32"), None), squared)

    native = (sizes.vocabulary, sizes.embedding, outputs)
    peers = {
        "PyTorch, frozen table": peer("table", *native, []),
        "PEFT TrainableTokens, 10 rows": peer("table", *native, rows),
    }
    return Group(
        f"Embedding {sizes.vocabulary:,} x {sizes.embedding}, bfloat16, {sizes.many:,} look-ups, 5% of them of 10 rows",
        task,
        {
            "frozen table (floor)": keras_run(model, only("kernel", "bias")),
            "finetooth, 10 rows": keras_run(model, tuned(*what)),
            "finetooth, 10 rows, composed": keras_run(model, tuned(*what, layer_rules=False)),
            "masked gradient + Adam": keras_run(model, partly(*what), masked=True),
            **(peers if TORCH else {}),
        },
    )


def blocks(width: int, side: int, rng: np.random.Generator) -> np.ndarray:
    """A mask of one in sixteen aligned square blocks."""
    count = (width // side) ** 2
    chosen = np.zeros(count, bool)
    chosen[rng.choice(count, max(1, count // 16), replace=False)] = True
    return np.kron(chosen.reshape(width // side, -1), np.ones((side, side), bool))


def singles(width: int, density: float, rng: np.random.Generator) -> np.ndarray:
    return rng.random((width, width), np.float32) < density


def points(sizes: Sizes) -> Group:
    model = partial(stack, sizes)

    def mask(kind: Callable[..., np.ndarray], of: float, layer: int) -> np.ndarray:
        return kind(sizes.width, of, np.random.default_rng(layer))

    def what(kind: Callable[..., np.ndarray], of: float) -> Callable[[keras.Model], list[Any]]:
        return lambda model: [(layer.kernel, mask(kind, of, i)) for i, layer in enumerate(model.layers)]

    def by_hand(density: float) -> Callable[[Task], Run]:
        def prepare(model: keras.Model) -> ft.Selection:
            return only("part")(model) | ft.select(model, *what(singles, density)(model))

        def layer(i: int) -> L.Layer:
            return PointsDense(sizes.width, mask(singles, density, i), "relu", f"d{i}")

        return keras_run(partial(stack, sizes, layer), prepare)

    sides = {f"finetooth, blocks of {side}": keras_run(model, tuned(what(blocks, side))) for side in (64, 128, 256)}
    return Group(
        f"{sizes.depth} x Dense({sizes.width}), bfloat16, {sizes.many:,} tokens; blocks: 1/16 of the kernel",
        partial(normal, sizes.many, sizes.width),
        {
            "biases only (floor)": keras_run(model, only("bias")),
            **sides,
            "finetooth, 1%": keras_run(model, tuned(what(singles, 0.01))),
            "finetooth, 0.1%": keras_run(model, tuned(what(singles, 0.001))),
            "finetooth, 1%, composed": keras_run(model, tuned(what(singles, 0.01), layer_rules=False)),
            "dense gradient by hand, 1%": by_hand(0.01),
            "dense gradient by hand, 0.1%": by_hand(0.001),
            "masked gradient + Adam": keras_run(model, partly(what(singles, 0.01)), masked=True),
        },
    )


def decoder(shape: Shape) -> Group:
    model = partial(llama, shape)
    heads, channels = max(1, shape.heads // 16), round(0.02 * shape.ffn)
    part = tuned(
        *(f"*/{name}/kernel[:, :{heads}]" for name in "qkv"),
        f"*/o/kernel[:{heads}]",
        *(f"*/{name}/kernel[:, :{channels}]" for name in ("gate", "up")),
        f"*/down/kernel[:{channels}]",
    )
    with_lora = partial(llama, shape, lambda layer: Lora(layer, shape.rank))

    def task() -> Task:
        tokens = np.random.default_rng(0).integers(0, shape.vocabulary, (shape.batch, shape.tokens + 1))
        x, y = (ops.convert_to_tensor(side, "int64" if TORCH else "int32") for side in (tokens[:, :-1], tokens[:, 1:]))
        return Task((x, y), backend.token_loss, keras.optimizers.AdamW)

    contenders = {
        "norms only (floor)": keras_run(model, only("scale")),
        "finetooth": keras_run(model, part),
        "factored LoRA": keras_run(with_lora, only("down", "up")),
        "full AdamW": keras_run(model, everything),
    }
    if TORCH:
        fused = {"optimizer": backend.torch.optim.AdamW}
        contenders |= {
            "finetooth, fused AdamW": keras_run(model, part, **fused),
            "full, fused AdamW": keras_run(model, everything, **fused),
            "PEFT LoRA, fused AdamW": peer("lora_llama", shape, False),
            "PEFT LoRA, float32 adapters": peer("lora_llama", shape, True),
            "transformers full, fused AdamW": peer("full_llama", shape),
        }
    title = (
        f"Llama's shape, {shape.layers} layers of {shape.width}, bfloat16, {shape.batch} x {shape.tokens:,} tokens; "
        f"finetooth: {heads} of {shape.heads} heads, {channels} of {shape.ffn} channels; LoRA: r={shape.rank}"
    )
    return Group(title, task, contenders, steps=8, rounds=3)
