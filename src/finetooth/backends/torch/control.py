"""PyTorch: branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch


def concrete(condition: torch.Tensor) -> bool | None:
    return True if condition.is_meta else bool(condition)  # only shapes are asked for, of what an open gate does


def assign_in_branch(
    condition: torch.Tensor, yes: Callable[[], Any], no: Callable[[], Any], variables: Sequence[keras.Variable]
) -> None:
    (yes if concrete(condition) else no)()
