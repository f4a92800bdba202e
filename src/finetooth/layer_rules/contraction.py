"""Contractions of an input and a kernel of which a part is trained: the backward computes the part's gradient alone.

A layer such as Dense is one einsum of input and kernel, `y = einsum("bc,cd->bd", x, W)`. The gradient of W is the
einsum of x and dy; restricted to rows R and columns C of W it is the same einsum of x[:, R] and dy[:, C]. So is every
other einsum whose kernel axes each belong to the input or to the output.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import keras

from ..backends import backend
from ..parts import composed as compose
from ..parts.trainable import TrainablePart
from .elements import Sampler

SLICE = "slice"  # the name of reading a grid of a kernel, in tables


@dataclass(frozen=True)
class Einsum:
    """An einsum of input and kernel for a fixed rank of the input."""

    x: str
    w: str
    y: str

    @property
    def equation(self) -> str:
        return f"{self.x},{self.w}->{self.y}"

    @property
    def separates(self) -> bool:
        """Whether every axis of one side is on another too, and none twice: then gradients are einsums as well."""
        sides = [set(self.x), set(self.w), set(self.y)]
        repeats = any(len(set(side)) != len(side) for side in (self.x, self.w, self.y))
        return "." not in self.w and not repeats and all(a <= b | c for a, b, c in itertools.permutations(sides))

    @property
    def is_product(self) -> bool:
        """Whether input, kernel and output, each reshaped to a matrix without moving data, are x @ W = y.

        `abY,YZ->abZ` is, and so is `aXY,XYZ->aZ`; `abY,ZY->abZ` is not, for which the kernel would be transposed.
        """
        summed = "".join(label for label in self.w if label in self.x)
        outputs, free = self.w.removeprefix(summed), self.x.removesuffix(summed)
        kernel_is_matrix = not set(outputs) & set(self.x)  # the summed axes come first
        return kernel_is_matrix and self.x == free + summed and self.y == free + outputs


class Contraction:
    """The operation of a layer whose kernel has a part, with what its backward needs: see `contract.Operation`."""

    def __init__(self, einsum: Einsum, plain: bool):
        self.einsum = einsum
        self.plain = plain  # a Dense: matrices are multiplied, without an equation

    def forward(self, x: Any, kernel: Any) -> Any:
        return backend.matmul(x, kernel) if self.plain else backend.einsum(self.einsum.equation, x, kernel)

    def gradient_x(self, dy: Any, kernel: Any, x: Any) -> Any:
        if self.plain:
            return backend.matmul(dy, kernel, transpose_b=True)
        return backend.einsum(f"{self.einsum.y},{self.einsum.w}->{self.einsum.x}", dy, kernel)


class GridContraction(Contraction):
    """A contraction with a grid of the kernel selected.

    Matrix units want slices of a round length: a range is widened to one, and the surplus is cut off the product.
    """

    def __init__(self, einsum: Einsum, plain: bool, part: TrainablePart):
        super().__init__(einsum, plain)
        self._axes = [(axis, *_widened(where, part.base.shape[axis])) for axis, where in part.tensor_region.axes]

    def keep(self, x: Any) -> Any:
        """Return what the part's gradient needs of the input."""
        return self._restricted(self.einsum.x, x)

    def gradient_part(self, kept: Any, dy: Any) -> Any:
        dy = self._restricted(self.einsum.y, dy)
        if self.plain:
            product = backend.matmul(backend.as_matrix(kept), backend.as_matrix(dy), transpose_a=True)
        else:
            product = backend.einsum(f"{self.einsum.x},{self.einsum.y}->{self.einsum.w}", kept, dy)
        for axis, _, within in self._axes:
            product = product if within is None else backend.take(product, axis, within)
        return product

    def _restricted(self, labels: str, value: Any) -> Any:
        for axis, where, _ in self._axes:
            label = self.einsum.w[axis]
            if label in labels:
                value = backend.take(value, labels.index(label), where)
        return value


def _widened(where: Any, length: int) -> tuple[Any, range | None]:
    """Return a range of round length around the range, and the range within it.

    Where the range has such a length already, or the axis does not, it is returned as it is, with None.
    """
    if not isinstance(where, range) or len(where) % backend.alignment() == 0:
        return where, None
    wide = len(where) + -len(where) % backend.alignment()
    start = min(where.start, length - wide)
    if start < 0:
        return where, None
    return range(start, start + wide), range(where.start - start, where.stop - start)


class PointContraction(Contraction):
    """A contraction with single elements of the kernel selected, or blocks of them."""

    def __init__(self, einsum: Einsum, plain: bool, sampler: Sampler):
        super().__init__(einsum, plain)
        self.sampler = sampler

    def keep(self, x: Any) -> Any:
        return x

    def gradient_part(self, kept: Any, dy: Any) -> Any:
        rows, columns = self.sampler.shape
        return self.sampler.product(keras.ops.reshape(kept, (-1, rows)), keras.ops.reshape(dy, (-1, columns)))


def contract(operation: Any, part: TrainablePart, x: Any, dtype: str | None = None) -> Any:
    """Return the operation on x and the part's merged variable, with a gradient for the part alone."""
    kernel = compose.merged(part)
    if dtype is not None or x.dtype != kernel.dtype:  # Keras promotes what differs
        dtype = dtype or keras.backend.result_type(x.dtype, kernel.dtype)
        x, kernel = keras.ops.cast(x, dtype), keras.ops.cast(kernel, dtype)
    return backend.product_with_part_gradient(operation, x, kernel, part.variable.value)
