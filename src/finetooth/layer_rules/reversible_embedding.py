"""ReversibleEmbedding: rows of its table looked up, and the same rows as outputs of the projection back to tokens.

With tied weights both directions read one table and give their gradients to one part.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import keras

from ..parts.trainable import TrainablePart
from ..regions.region import Grid
from . import embedding
from .contraction import SLICE, Einsum, GridContraction, contract
from .rule import Rule


def rule(layer: keras.Layer, parts: Collection[TrainablePart]) -> Rule | None:
    """The rule for a stock layer: whole rows of its table, any grid of a projection of its own."""
    if type(layer) is not keras.layers.ReversibleEmbedding or layer.mask_zero:
        return None  # the mask that it sets itself is beyond a public call
    rows = embedding.rows_of(layer, parts)
    outputs = rows if layer.tie_weights else _own_projection(layer, parts)
    names = {part: name for part, name in ((outputs, SLICE), (rows, embedding.NAME)) if part is not None}
    if not names:
        return None
    look_up = embedding.reader(layer, rows) if rows is not None else None
    kernel = "ZY" if layer.tie_weights else "YZ"

    def call(inputs: Any, reverse: bool = False) -> Any:
        if not reverse:
            return look_up(inputs) if look_up else keras.layers.Embedding.call(layer, inputs)
        if outputs is None:
            return keras.layers.ReversibleEmbedding.call(layer, inputs, reverse=True)
        free = "abcdefgh"[: len(inputs.shape) - 1]
        operation = GridContraction(Einsum(free + "Y", kernel, free + "Z"), False, outputs)
        logits = contract(operation, outputs, inputs, layer.reverse_dtype)
        cap = layer.logit_soft_cap
        return logits if cap is None else keras.ops.tanh(logits / cap) * cap

    return Rule(names, call)


def _own_projection(layer: keras.Layer, parts: Collection[TrainablePart]) -> TrainablePart | None:
    own = (part for part in parts if part.base is layer.reverse_embeddings)
    return next((part for part in own if isinstance(part.region, Grid)), None)
