"""Dense and EinsumDense with a part of their kernel selected: the backward computes the part's gradient, and no more.

Both layers are one einsum of input and kernel, `y = einsum("bc,cd->bd", x, W)`. The gradient of W is the einsum of x
and dy; restricted to rows R and columns C of W it is the same einsum of x[:, R] and dy[:, C]. So is every other einsum
whose kernel axes each belong to the input or to the output. Single elements are in `points`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import keras

from ..backends import backend
from ..parts import composed as compose
from ..parts.trainable import Trained
from ..regions.region import Grid, Points
from . import elements as points
from .rule import Rule

NAME = "slice"


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
        """Whether input, kernel and output, each reshaped to a matrix without moving data, are x @ W = y."""
        contracted = "".join(label for label in self.w if label in self.x)
        kept = self.w.removeprefix(contracted)
        free = self.x.removesuffix(contracted)
        return not set(kept) & set(self.x) and self.x == free + contracted and self.y == free + kept


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
    """With a grid of the kernel selected.

    Matrix units want slices of a round length: a range is widened to one, and what is too much is cut off the product.
    """

    def __init__(self, einsum: Einsum, plain: bool, part: Trained):
        super().__init__(einsum, plain)
        self._axes = [(axis, *_widened(where, part.base.shape[axis])) for axis, where in part.tensor_region.axes]

    def keep(self, x: Any) -> Any:
        """What must be kept of the input for the part's gradient."""
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
    """A range of round length around the range, and where in it the range is; None where it is as it was."""
    if not isinstance(where, range) or len(where) % backend.alignment() == 0:
        return where, None
    wide = len(where) + -len(where) % backend.alignment()
    start = min(where.start, length - wide)
    if start < 0:
        return where, None
    return range(start, start + wide), range(where.start - start, where.stop - start)


class PointContraction(Contraction):
    """With single elements of the kernel selected, or blocks of them."""

    def __init__(self, einsum: Einsum, plain: bool, sampler: points.Sampler):
        super().__init__(einsum, plain)
        self.sampler = sampler

    def keep(self, x: Any) -> Any:
        return x

    def gradient_part(self, kept: Any, dy: Any) -> Any:
        rows, columns = self.sampler.shape
        return self.sampler.product(keras.ops.reshape(kept, (-1, rows)), keras.ops.reshape(dy, (-1, columns)))


def rule(layer: keras.Layer, parts: Collection[Trained]) -> Rule | None:
    """The rule for a stock layer; a subclass may read its kernel in any way."""
    if type(layer) not in (keras.layers.Dense, keras.layers.EinsumDense):
        return None
    if layer.lora_enabled or layer.quantization_mode is not None:
        return None
    part = next((part for part in parts if layer.kernel is part.base), None)
    making = _making(layer, part) if part is not None else None
    if part is None or making is None:
        return None
    name, make = making
    operations: dict[int, Contraction] = {}

    def call(inputs: Any, training: bool | None = None) -> Any:
        rank = len(inputs.shape)
        if rank not in operations:
            operations[rank] = make(rank)
        outputs = contract(operations[rank], part, inputs)
        if layer.bias is not None:
            outputs = keras.ops.add(outputs, layer.bias)
        return outputs if layer.activation is None else layer.activation(outputs)

    return Rule({part: name}, call)


def contract(operation: Any, part: Trained, x: Any, dtype: str | None = None) -> Any:
    """The operation on x and the part's variable, merged, with a gradient for the part alone."""
    kernel = compose.merged(part)
    if dtype is not None or x.dtype != kernel.dtype:  # Keras promotes what differs
        dtype = dtype or keras.backend.result_type(x.dtype, kernel.dtype)
        x, kernel = keras.ops.cast(x, dtype), keras.ops.cast(kernel, dtype)
    return backend.product_with_part_gradient(operation, x, kernel, part.variable.value)


def _making(layer: keras.Layer, part: Trained) -> tuple[str, Callable[[int], Contraction]] | None:
    """The name of the way in which the part is read, and what makes the operation for an input's rank."""
    plain = isinstance(layer, keras.layers.Dense)
    einsum = _einsum(layer, len(part.region.shape) + 1)
    if not einsum.separates:
        return None
    if isinstance(part.region, Grid):
        return NAME, lambda rank: GridContraction(_einsum(layer, rank), plain, part)
    if isinstance(part.region, Points) and einsum.is_product:
        sampler = points.sampler(part.region, sum(label in einsum.x for label in einsum.w))
        return sampler.name, lambda rank: PointContraction(_einsum(layer, rank), plain, sampler)
    return None


def _einsum(layer: keras.Layer, rank: int) -> Einsum:
    """The layer's einsum with a letter for every axis of an input of this rank."""
    if isinstance(layer, keras.layers.Dense):
        free = _letters("", rank - 1)
        return Einsum(free + "Y", "YZ", free + "Z")
    x, w, y = layer.equation.replace("->", ",").replace(" ", "").split(",")
    free = _letters(x + w + y, rank - len(x.replace("...", "")))
    return Einsum(x.replace("...", free), w, y.replace("...", free))


def _letters(used: str, count: int) -> str:
    """So many letters that do not occur yet."""
    return "".join(letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWX" if letter not in used)[: max(count, 0)]
