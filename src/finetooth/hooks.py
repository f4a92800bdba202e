"""Reversible changes to objects that other people own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def hooked(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """While open, `owner.name(...)` runs `around(original, ...)`. The class is untouched, and so is a later owner."""
    before = owner.__dict__.get(name, _MISSING)
    original = getattr(owner, name)

    @functools.wraps(original)
    def hook(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    owner.__dict__[name] = hook
    try:
        yield
    finally:
        if before is _MISSING:
            del owner.__dict__[name]
        else:
            owner.__dict__[name] = before
