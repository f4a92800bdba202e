"""JAX: a base variable and its part. Arrays are never written, so values are merged when they are read."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import jax

from ..contract import LinkedPart


class Link:
    """A base and its part: see `contract.Link`. A JAX array is never written; values are merged when they are read."""

    base_is_current = False
    differentiable_reads = True

    def __init__(self, part: LinkedPart):
        self._part = part

    def holds_merged(self) -> bool:
        return False

    def alias(self, value: jax.Array) -> jax.Array:
        return value

    def write_base(self) -> None:
        """Nothing: the base is written when the tuning ends."""

    def sync(self) -> None:
        """Nothing: the values are merged when they are read."""

    def base_assigned(self, value: jax.Array) -> None:
        self._part.load(value)

    def opened(self) -> AbstractContextManager[None]:
        return nullcontext()
