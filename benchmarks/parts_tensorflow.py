"""Updates of some elements, and lazy steps, in TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import finetooth as ft

Update = tuple[Callable[[], Any], Callable[[], Any]]


def updates(shape: tuple[int, int], index: Any, only: str | None = None) -> dict[str, Update]:
    x = tf.random.normal((8, shape[0]))
    part = ft.Part(tf.Variable(tf.zeros(shape)), index)
    new = tf.random.normal(part.shape)
    coordinates = tf.constant(np.stack(np.unravel_index(part.region.flat(), shape), -1))
    flat = tf.reshape(new, [-1])
    slices = isinstance(index, tuple) and all(isinstance(entry, slice) for entry in index)

    def finetooth(variable: tf.Variable) -> Callable[[], Any]:
        mine = ft.Part(variable, index)
        return lambda: mine.assign(new)

    def copied(variable: tf.Variable) -> Callable[[], Any]:
        return lambda: variable.assign(tf.tensor_scatter_nd_update(variable, coordinates, flat))

    def scattered(variable: tf.Variable) -> Callable[[], Any]:
        return lambda: variable.scatter_nd_update(coordinates, flat)

    def rows(variable: tf.Variable) -> Callable[[], Any]:
        slices = tf.IndexedSlices(new, tf.constant(index))
        return lambda: variable.scatter_update(slices)

    def sliced(variable: tf.Variable) -> Callable[[], Any]:
        return lambda: variable[index].assign(new)

    makes = {"finetooth": finetooth, "assign(tensor_scatter_nd_update)": copied, "scatter_nd_update": scattered}
    makes |= {"scatter_update of rows": rows} if isinstance(index, np.ndarray) and index.dtype != bool else {}
    makes |= {"slice assignment": sliced} if slices else {}
    made = {}
    for name, make in makes.items():
        if only in (None, name):
            variable = tf.Variable(tf.zeros(shape))
            made[name] = make(variable), lambda variable=variable: tf.matmul(x, variable)
    return made


def table_steps(rows: int, width: int, lookups: int, only: Sequence[str] = ()) -> dict[str, Callable[[], Any]]:
    tokens = tf.constant(np.random.default_rng(0).integers(0, rows, lookups))
    targets = tf.random.normal((lookups, width))

    def loss_of(table: tf.Variable) -> tf.Tensor:
        return tf.reduce_mean((tf.gather(table, tokens) - targets) ** 2)

    def with_optimizer(optimizer: keras.optimizers.Optimizer, jit: bool = False) -> Callable[[], Any]:
        table = tf.Variable(tf.zeros((rows, width)))
        optimizer.build([table])

        @tf.function(jit_compile=jit)
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(table)
            optimizer.apply([tape.gradient(loss, table)], [table])

        return step

    def by_hand() -> Callable[[], Any]:
        table, m, v = (tf.Variable(tf.zeros((rows, width))) for _ in range(3))
        count = tf.Variable(0.0)

        @tf.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(table)
            gradient = tape.gradient(loss, table)
            used, slots = tf.unique(gradient.indices)
            g = tf.math.unsorted_segment_sum(gradient.values, slots, tf.size(used))
            count.assign_add(1.0)
            new_m = 0.9 * tf.gather(m, used) + 0.1 * g
            new_v = 0.999 * tf.gather(v, used) + 0.001 * g * g
            rate = 1e-3 * tf.sqrt(1 - 0.999**count) / (1 - 0.9**count)
            m.scatter_update(tf.IndexedSlices(new_m, used))
            v.scatter_update(tf.IndexedSlices(new_v, used))
            table.scatter_sub(tf.IndexedSlices(rate * new_m / (tf.sqrt(new_v) + 1e-7), used))

        return step

    makes = {
        "finetooth": lambda: with_optimizer(ft.LazyOptimizer(keras.optimizers.Adam())),
        "Keras Adam": lambda: with_optimizer(keras.optimizers.Adam()),
        "Keras Adam, XLA": lambda: with_optimizer(keras.optimizers.Adam(), jit=True),
        "lazy Adam by hand": by_hand,
    }
    return {name: make() for name, make in makes.items() if name in (only or makes)}
