"""Layers that others would write by hand, as fast as we can write them."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np

from .run import backend

L = keras.layers


class Lora(L.Layer):
    """A frozen layer plus a product of two thin matrices: the factored form, which makes no full-size gradient."""

    def __init__(self, inner: L.Dense | L.EinsumDense, rank: int, activation: str | None = None):
        super().__init__(name=inner.name)
        self.inner, self.rank = inner, rank
        self.activation = keras.activations.get(activation)

    def build(self, shape: Any) -> None:
        self.inner.build(shape)
        self.inner.trainable = False
        free = min(2, len(shape) - 1)  # axes of examples and positions
        self.inputs = math.prod(shape[free:])
        outputs = math.prod(self.inner.kernel.shape) // self.inputs
        thin = keras.initializers.GlorotUniform(seed=0)  # without one, the weights of later layers would be others
        self.down = self.add_weight(name="down", shape=(self.inputs, self.rank), initializer=thin)
        self.up = self.add_weight(name="up", shape=(self.rank, outputs), initializer="zeros")

    def call(self, x: Any) -> Any:
        thin = keras.ops.matmul(keras.ops.reshape(x, (-1, self.inputs)), self.down)
        return self.activation(backend.plus_product(self.inner.call(x), thin, self.up.value))

    def compute_output_spec(self, x: Any) -> Any:
        return self.inner.compute_output_spec(x)


class PointsDense(L.Layer):
    """A Dense layer of which single elements train: a live kernel, its dense gradient, and what is taken from that."""

    def __init__(self, units: int, mask: np.ndarray, activation: str, name: str):
        super().__init__(name=name)
        self.units, self.mask = units, mask
        self.activation = keras.activations.get(activation)

    def build(self, shape: Any) -> None:
        points = np.flatnonzero(self.mask)
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], self.units), initializer="glorot_uniform")
        self.bias = self.add_weight(name="bias", shape=(self.units,), initializer="zeros")
        self.part = self.add_weight(
            name="part", shape=(len(points),), initializer="zeros", dtype="float32", autocast=False
        )
        self.points = keras.ops.convert_to_tensor(points, "int32" if keras.backend.backend() == "jax" else "int64")
        self.part.assign(keras.ops.take(keras.ops.reshape(self.kernel, (-1,)), self.points))

    def call(self, x: Any) -> Any:
        y = backend.live_product(self.points, x, self.kernel, self.part.value)
        return self.activation(keras.ops.add(y, self.bias))

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor((*x.shape[:-1], self.units), self.compute_dtype)
