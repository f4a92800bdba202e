"""Layer rules: for stock layers, a call whose backward costs what the parts of their variables do.

A new rule is a file with a function `rule(layer, parts)` and an entry in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Collection

import keras

from ..keras_internals.calls import is_keras_call
from ..parts.trainable import TrainablePart
from . import convolution, dense, embedding, reversible_embedding
from .rule import Rule

FAMILIES = (dense, convolution, embedding, reversible_embedding)


def rule_for(layer: keras.Layer, parts: Collection[TrainablePart]) -> Rule | None:
    """Return the rule for parts of variables that the layer owns; None where only the composed read will do."""
    if not is_keras_call(layer):  # a rule stands in for Keras' own call, and would pass by a patched one
        return None
    rules = (family.rule(layer, parts) for family in FAMILIES)
    return next((rule for rule in rules if rule is not None), None)
