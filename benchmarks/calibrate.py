"""Measure the costs by which finetooth chooses how to compute single elements of a gradient.

    KERAS_BACKEND=jax python benchmarks/calibrate.py

Prints the three numbers of `ProductCosts` for the backend and device in use: the time for an element of a^T b when it
is computed by itself, when in a block, and for gathering the block's operands, where in the whole product it is one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from finetooth.backends import backend
from finetooth.layer_rules import elements

SIDES = (64, 128, 256)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True)
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    return function


def seconds(sampler: elements.Sampler, x: Any, dy: Any) -> float:
    """The median time of a product, with the wait for it."""
    product = compiled(sampler.product)
    times = []
    for _ in range(12):
        start = time.perf_counter()
        keras.ops.convert_to_numpy(product(x, dy)[:1])
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def scattered(width: int, density: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    chosen = np.sort(rng.choice(width**2, int(density * width**2), replace=False))
    return np.divmod(chosen, width)


def blocks(width: int, side: int, density: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    across = width // side
    grid = np.zeros(across**2, bool)
    grid[rng.choice(across**2, max(2, int(density * across**2)), replace=False)] = True
    return np.nonzero(np.kron(grid.reshape(across, across), np.ones((side, side), bool)))


def main() -> None:
    rng = np.random.default_rng(0)
    on_cpu = backend.alignment() == 1
    width, count, dtype = (1024, 1024, "float32") if on_cpu else (4096, 8192, "bfloat16")
    shape = (width, width)
    x, dy = (keras.ops.cast(rng.normal(size=(count, width)).astype("float32"), dtype) for _ in range(2))
    whole = seconds(elements.WholeProduct(shape, *scattered(width, 0.01, rng)), x, dy)
    print(f"{keras.backend.backend()}, {width} x {width}, {count} rows, {dtype}: whole product {1000 * whole:.3f} ms")

    slopes = []
    for density in (0.001, 0.004):
        sampled = seconds(elements.SampledProduct(shape, *scattered(width, density, rng)), x, dy)
        slopes.append(sampled / whole / density)
        print(f"  {density:.1%} sampled {1000 * sampled:.3f} ms")
    by_side = []
    for side in SIDES:
        rows, columns = blocks(width, side, 1 / 16, rng)
        block = seconds(elements.BlockProduct(shape, rows, columns, side), x, dy)
        by_side.append(block / whole / (len(rows) / width**2))
        print(f"  {len(rows) / width**2:.1%} in blocks of {side} {1000 * block:.3f} ms")
    gathered, in_block = np.polyfit([1 / side for side in SIDES], by_side, 1)
    print(f"ProductCosts(sampled={max(slopes):.0f}, block={in_block:.1f}, gathered={gathered:.0f})")


if __name__ == "__main__":
    main()
