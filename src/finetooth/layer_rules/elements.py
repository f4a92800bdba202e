"""Single elements of a matrix product's gradient: which of three ways is the cheapest.

The gradient is x^T dy, of which only the selected elements are wanted. Sampling computes each as a product of two
columns; blocks are small matrix products; and the dense product, of which the elements are then taken, is what matrix
units do best. All three are linear in the number of rows of x and dy, so that density and the blocks' side decide.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import keras
import numpy as np

from ..backends import backend
from ..regions.region import Points

BLOCKS = (256, 128, 64)  # smaller ones leave matrix units idle


class Sampler(Protocol):
    """Computes chosen elements of x^T dy, a matrix of this shape."""

    name: str
    shape: tuple[int, int]

    def product(self, x: Any, dy: Any) -> Any: ...


class WholeProduct:
    """The whole product, then its elements."""

    name = "dense"

    def __init__(self, shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray):
        self.shape = shape
        self._points = backend.coordinates((rows, columns))

    def product(self, x: Any, dy: Any) -> Any:
        return backend.take_points(backend.matmul(x, dy, transpose_a=True), self._points)


class SampledProduct:
    """Each element by itself."""

    name = "sampled"

    def __init__(self, shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray):
        self.shape = shape
        self._samples = backend.samples(shape, rows, columns)

    def product(self, x: Any, dy: Any) -> Any:
        return backend.sampled_product(self._samples, x, dy)


class BlockProduct:
    """Aligned square blocks, each a matrix product."""

    name = "blocks"

    def __init__(self, shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray, side: int):
        self.shape = shape
        self._side = side
        blocks, which = np.unique(_block(shape, rows, columns, side), return_inverse=True)
        down, across = np.divmod(blocks, shape[1] // side)
        order = which * side**2 + rows % side * side + columns % side  # of each point among the blocks' elements
        self._down, self._across = (keras.ops.convert_to_tensor(array, "int32") for array in (down, across))
        self._order = backend.coordinates((order,))

    def product(self, x: Any, dy: Any) -> Any:
        x, dy = self._gathered(x, self._down), self._gathered(dy, self._across)
        products = backend.einsum("knr,knc->krc", x, dy)
        return backend.take_points(keras.ops.reshape(products, (-1,)), self._order)

    def _gathered(self, value: Any, blocks: Any) -> Any:
        """The columns of each block, one after the other."""
        by_block = keras.ops.reshape(value, (-1, value.shape[-1] // self._side, self._side))
        return keras.ops.take(keras.ops.transpose(by_block, (1, 0, 2)), blocks, axis=0)


def sampler(region: Points, contracted: int) -> Sampler:
    """Return the cheapest way to compute these elements.

    Args:
        region: Single elements of a kernel.
        contracted: How many of the kernel's leading axes are summed with the input.
    """
    shape = math.prod(region.shape[:contracted]), math.prod(region.shape[contracted:])
    rows, columns = np.divmod(region.flat(), shape[1])
    density = region.size / math.prod(shape)
    side = _side(shape, rows, columns)
    costs = backend.product_costs()
    by_block = density * (costs.block + costs.gathered / side) if side else 1.0
    if side and by_block < min(1.0, density * costs.sampled):
        return BlockProduct(shape, rows, columns, side)
    return (SampledProduct if density * costs.sampled < 1 else WholeProduct)(shape, rows, columns)


def _side(shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> int | None:
    """The side of the largest blocks that the points consist of."""
    for side in BLOCKS:
        if shape[0] % side == shape[1] % side == 0 and len(rows) % side**2 == 0:
            if len(np.unique(_block(shape, rows, columns, side))) * side**2 == len(rows):
                return side
    return None


def _block(shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray, side: int) -> np.ndarray:
    """The number of the block that holds each point."""
    return rows // side * (shape[1] // side) + columns // side
