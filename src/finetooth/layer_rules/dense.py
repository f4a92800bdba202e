"""Dense and EinsumDense with a part of their kernel selected: see `contraction`, and `elements` for single elements."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import keras

from ..parts.trainable import TrainablePart
from ..regions.region import Grid, Points
from . import elements
from .contraction import SLICE, Contraction, Einsum, GridContraction, PointContraction, contract
from .rule import Rule


def rule(layer: keras.Layer, parts: Collection[TrainablePart]) -> Rule | None:
    """Return the rule for a stock layer, if it has one; a subclass may read its kernel in any way."""
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


def _making(layer: keras.Layer, part: TrainablePart) -> tuple[str, Callable[[int], Contraction]] | None:
    """Return the name of the way in which the part is read, and a function from an input's rank to the operation."""
    plain = isinstance(layer, keras.layers.Dense)
    einsum = _einsum(layer, len(part.region.shape) + 1)
    if not einsum.separates:
        return None
    if isinstance(part.region, Grid):
        return SLICE, lambda rank: GridContraction(_einsum(layer, rank), plain, part)
    if isinstance(part.region, Points) and einsum.is_product:
        sampler = elements.sampler(part.region, sum(label in einsum.x for label in einsum.w))
        return sampler.name, lambda rank: PointContraction(_einsum(layer, rank), plain, sampler)
    return None


def _einsum(layer: keras.Layer, rank: int) -> Einsum:
    """Return the layer's einsum with a letter for every axis of an input of this rank."""
    if isinstance(layer, keras.layers.Dense):
        free = _letters("", rank - 1)
        return Einsum(free + "Y", "YZ", free + "Z")
    x, w, y = layer.equation.replace("->", ",").replace(" ", "").split(",")
    free = _letters(x + w + y, rank - len(x.replace("...", "")))
    return Einsum(x.replace("...", free), w, y.replace("...", free))


def _letters(used: str, count: int) -> str:
    """Return `count` letters that are not used yet."""
    return "".join(letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWX" if letter not in used)[: max(count, 0)]
