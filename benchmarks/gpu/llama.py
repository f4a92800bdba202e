"""A decoder of Llama's shape as an ordinary Keras model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

L, ops = keras.layers, keras.ops


@dataclass(frozen=True)
class Shape:
    layers: int = 22
    width: int = 2048
    heads: int = 32
    ffn: int = 5632
    vocabulary: int = 32_000
    batch: int = 4
    tokens: int = 1024
    rank: int = 32  # of LoRA

    @property
    def head(self) -> int:
        return self.width // self.heads


def llama(shape: Shape, projection: Callable[[L.Layer], L.Layer] = lambda layer: layer) -> keras.Model:
    """The model; `projection` may put something around each of the seven linear layers of a block."""
    tokens = keras.Input((shape.tokens,), dtype="int32")
    angles = Angles(shape.head, name="angles")(tokens)
    x = L.Embedding(shape.vocabulary, shape.width, name="embedding")(tokens)
    for i in range(shape.layers):
        x = Block(shape, projection, name=f"block_{i}")(x, *angles)
    x = L.RMSNormalization(name="norm")(x)
    return keras.Model(tokens, L.Dense(shape.vocabulary, use_bias=False, name="head")(x))


class Angles(L.Layer):
    """The cosines and sines by which each position turns the pairs of a head."""

    def __init__(self, size: int, name: str):
        super().__init__(name=name)
        self.size = size

    def call(self, tokens: Any) -> Any:
        positions = ops.arange(tokens.shape[1], dtype="float32")
        speeds = ops.power(10_000.0, -ops.arange(0, self.size, 2, dtype="float32") / self.size)
        angles = ops.outer(positions, speeds)[:, None, :]
        return ops.cast(ops.cos(angles), self.compute_dtype), ops.cast(ops.sin(angles), self.compute_dtype)


class Block(L.Layer):
    """Attention with rotary positions, then a gated feed-forward network."""

    def __init__(self, shape: Shape, projection: Callable[[L.Layer], L.Layer], name: str):
        super().__init__(name=name)
        self.shape = shape
        heads = {"equation": "btd,dnh->btnh", "output_shape": (None, shape.heads, shape.head)}
        output = {"equation": "btnh,nhd->btd", "output_shape": (None, shape.width)}
        self.norm_1, self.norm_2 = (L.RMSNormalization(name=f"norm_{i}") for i in (1, 2))
        self.q, self.k, self.v = (projection(L.EinsumDense(**heads, name=name)) for name in ("q", "k", "v"))
        self.o = projection(L.EinsumDense(**output, name="o"))
        self.gate, self.up = (projection(L.Dense(shape.ffn, use_bias=False, name=name)) for name in ("gate", "up"))
        self.down = projection(L.Dense(shape.width, use_bias=False, name="down"))

    def build(self, inputs: Any, *_: Any) -> None:
        batch = inputs[:-1]
        for layer in (self.norm_1, self.norm_2, self.q, self.k, self.v, self.gate, self.up):
            layer.build(inputs)
        self.o.build((*batch, self.shape.heads, self.shape.head))
        self.down.build((*batch, self.shape.ffn))

    def call(self, x: Any, cosines: Any, sines: Any) -> Any:
        normed = self.norm_1(x)
        q, k = turned(self.q(normed), cosines, sines), turned(self.k(normed), cosines, sines)
        x = x + self.o(ops.dot_product_attention(q, k, self.v(normed), is_causal=True))
        normed = self.norm_2(x)
        return x + self.down(ops.silu(self.gate(normed)) * self.up(normed))

    def compute_output_spec(self, x: Any, *_: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)


def turned(x: Any, cosines: Any, sines: Any) -> Any:
    a, b = ops.split(x, 2, axis=-1)
    return ops.concatenate([a * cosines - b * sines, b * cosines + a * sines], axis=-1)
