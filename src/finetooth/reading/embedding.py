"""Embedding with rows of its table selected: no copy of the table, no gradient of its size.

A look-up reads the frozen table, and the part where a token's row is selected. Backward, the gradients of such tokens
are summed by row, repeated tokens included; the others go nowhere.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ..backends import backend
from ..part import Part
from ..region import Grid
from . import compose

NAME = "rows"


class Rows:
    """Which row of the part each token reads, or -1: the selected rows of a table, ready for the backend."""

    def __init__(self, part: Part):
        rows, vocabulary = np.asarray(part.region.axes[0]), part.region.shape[0]  # type: ignore[attr-defined]
        slots = np.full(vocabulary, -1, np.int32)
        slots[rows] = np.arange(len(rows))
        self.count = len(rows)
        self._slots = keras.ops.convert_to_tensor(slots)

    def slots(self, tokens: Any) -> Any:
        """The part's row for each token; -1 where the token's row is frozen."""
        return keras.ops.take(self._slots, tokens, axis=0)


def fits(layer: keras.Layer, part: Part) -> bool:
    """Whether the layer is an Embedding and the part whole rows of its table."""
    return (
        type(layer) is keras.layers.Embedding
        and isinstance(part.region, Grid)
        and len(part.region.axes[1]) == part.region.shape[1]
        and not layer.lora_enabled
        and layer.quantization_mode is None
        and layer.embeddings is part.base
    )


def call(layer: keras.Layer, part: Part, rows: Rows, inputs: Any) -> Any:
    """The layer's call, with the table read as base and part."""
    tokens = inputs if keras.backend.standardize_dtype(inputs.dtype) in ("int32", "int64") else None
    tokens = keras.ops.cast(inputs, "int32") if tokens is None else tokens
    table = compose.base_value(part.base)
    compact = keras.ops.cast(part.variable.value, table.dtype)
    outputs = backend.look_up(rows, tokens, table, compact)
    return keras.ops.cast(outputs, layer.compute_dtype)
