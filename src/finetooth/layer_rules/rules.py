"""Which rule a layer reads its parts by: one whose backward costs what the part does. The rest is composed."""

from __future__ import annotations

from collections.abc import Collection

import keras

from ..parts.trainable import Trained
from . import convolution, embedding
from . import dense as linear
from . import reversible_embedding as reversible
from .rule import Rule

FAMILIES = (linear, convolution, embedding, reversible)


def rule_for(layer: keras.Layer, parts: Collection[Trained]) -> Rule | None:
    """The rule for parts of variables that the layer owns; None where only the composed read will do."""
    rules = (family.rule(layer, parts) for family in FAMILIES)
    return next((rule for rule in rules if rule is not None), None)
