"""Embedding with rows of its table selected: no copy of the table, no gradient of its size.

A look-up reads the frozen table, and the part where a token's row is selected. Backward, the gradients of such tokens
are summed by row, repeated tokens included; the others go nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import keras
import numpy as np

from ..backends import backend
from ..parts import composed as compose
from ..parts.trainable import TrainablePart
from ..regions.region import Grid
from .rule import Rule

NAME = "rows"


class RowSlots:
    """The row of the part that each token reads, or -1, as a tensor for the backend."""

    def __init__(self, part: TrainablePart):
        rows, vocabulary = np.asarray(part.region.axes[0]), part.region.shape[0]  # type: ignore[attr-defined]
        slots = np.full(vocabulary, -1, np.int32)
        slots[rows] = np.arange(len(rows))
        self.count = len(rows)
        self._slots = keras.ops.convert_to_tensor(slots)

    def slots(self, tokens: Any) -> Any:
        """Return the part's row for each token; -1 where the token's row is frozen."""
        return keras.ops.take(self._slots, tokens, axis=0)


def rule(layer: keras.Layer, parts: Collection[TrainablePart]) -> Rule | None:
    """The rule for a stock layer of which whole rows are selected."""
    part = rows_of(layer, parts) if type(layer) is keras.layers.Embedding else None
    return Rule({part: NAME}, reader(layer, part)) if part is not None else None


def rows_of(layer: keras.Layer, parts: Collection[TrainablePart]) -> TrainablePart | None:
    """The part that is whole rows of the layer's table, if there is one and the layer reads its table plainly."""
    if layer.lora_enabled or layer.quantization_mode is not None:
        return None
    return next((part for part in parts if part.base is layer.embeddings and _are_rows(part)), None)


def reader(layer: keras.Layer, part: TrainablePart) -> Callable[[Any], Any]:
    """A look-up as the layer's, with the table read as base and part."""
    rows = RowSlots(part)

    def call(inputs: Any) -> Any:
        known = keras.backend.standardize_dtype(inputs.dtype) in ("int32", "int64")
        tokens = inputs if known else keras.ops.cast(inputs, "int32")
        outputs = backend.look_up(rows, tokens, compose.base_value(part.base), part)
        return keras.ops.cast(outputs, layer.compute_dtype)

    return call


def _are_rows(part: TrainablePart) -> bool:
    return isinstance(part.region, Grid) and len(part.region.axes[1]) == part.region.shape[1]
