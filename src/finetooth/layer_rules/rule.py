"""What a rule is: a layer's own call, reading parts of the layer's variables at a cost that follows the parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..parts.trainable import Trained


@dataclass(frozen=True)
class Rule:
    """A call in place of the layer's, and for each part that it reads the name of the way it does so."""

    parts: Mapping[Trained, str]
    call: Callable[..., Any]
