"""JAX: a base variable and its part. Arrays are never written, so values are merged when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax


class Link:
    """A base and its part: see `base.Link`. A JAX array is never written; values are merged when they are read."""

    base_is_current = False
    differentiable_reads = True

    def __init__(self, part: Any):
        self._part = part

    def holds_merged(self) -> bool:
        return False

    def alias(self, value: jax.Array) -> jax.Array:
        return value

    def sync(self) -> None:
        """Nothing: the values are merged when they are read."""

    def base_assigned(self, value: jax.Array) -> None:
        self._part.load(value)

    def opened(self) -> AbstractContextManager[Any]:
        return nullcontext()


def stepping(optimizer: Any, links: Sequence[Link]) -> AbstractContextManager[Any]:
    return nullcontext()
