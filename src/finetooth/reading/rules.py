"""Which rule reads a part in a layer, if any: those whose backward costs what the part does. The rest is composed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from ..part import Part
from . import embedding, linear


@dataclass(frozen=True)
class Rule:
    """A layer's call that reads one part in its own way, and what the table calls it."""

    name: str
    call: Callable[[Any], Any]


def rule_for(layer: keras.Layer, part: Part) -> Rule | None:
    """The rule for a part of a variable that the layer owns; None where only the composed read will do."""
    if linear.fits(layer, part):
        return Rule(linear.NAME, lambda inputs: linear.call(layer, part, inputs))
    if embedding.fits(layer, part):
        rows = embedding.Rows(part)
        return Rule(embedding.NAME, lambda inputs: embedding.call(layer, part, rows, inputs))
    return None
