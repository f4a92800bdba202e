"""Rule: a call in place of a layer's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..parts.trainable import TrainablePart


@dataclass(frozen=True)
class Rule:
    """A call in place of the layer's, and for each part that it reads the name of the way it does so."""

    parts: Mapping[TrainablePart, str]
    call: Callable[..., Any]
