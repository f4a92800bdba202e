"""Reversible changes to methods of objects that belong to the user."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import marks

_MISSING = object()
_lock = threading.RLock()  # tunings in several threads hook the same functions of Keras


@contextmanager
def hooked(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Context manager: `owner.name(...)` runs `around(original, ...)`; the class is not changed.

    A method may be hooked several times; the hook opened last runs first. Hooks may be closed in any order. With the
    last one `owner.__dict__` is what it was before the first, unless the user has set the attribute in the meantime.
    """
    entry = object()
    with _lock:
        chain = _Chain.at(owner, name)
        chain.hooks[entry] = around
    try:
        yield
    finally:
        with _lock:
            del chain.hooks[entry]
            if not chain.hooks:
                chain.remove(owner, name)


def replaced(owner: Any, name: str) -> bool:
    """Test whether the user has set the attribute on this object, be it below our hooks or above them."""
    chain = _Chain.installed(owner, name)
    return owner.__dict__.get(name, _MISSING) is not _MISSING if chain is None else chain.replaces


class _Chain:
    """The hooks of one method of one object."""

    def __init__(self, owner: Any, name: str):
        self.hooks: dict[object, Callable[..., Any]] = {}  # in the order in which they were opened
        self._before = owner.__dict__.get(name, _MISSING)
        original = getattr(owner, name)

        @functools.wraps(original)
        def installed(*args: Any, **kwargs: Any) -> Any:
            call = original
            for around in tuple(self.hooks.values()):
                call = functools.partial(around, call)
            return call(*args, **kwargs)

        self._installed = installed
        installed.__dict__[marks.CHAIN] = self
        owner.__dict__[name] = installed

    @classmethod
    def at(cls, owner: Any, name: str) -> _Chain:
        """Return the chain that is installed as `owner.name`, or install a new one around the present method."""
        return cls.installed(owner, name) or cls(owner, name)

    @classmethod
    def installed(cls, owner: Any, name: str) -> _Chain | None:
        """Return the chain that is installed as `owner.name`, if one is."""
        current = owner.__dict__.get(name)
        chain = getattr(current, marks.CHAIN, None)
        # A user's function that wraps ours with `functools.wraps` carries our attribute, too, and is not ours.
        return chain if chain is not None and chain._installed is current else None

    @property
    def replaces(self) -> bool:
        """Whether the object had an attribute of this name before."""
        return self._before is not _MISSING

    def remove(self, owner: Any, name: str) -> None:
        """Put back the attribute from before, unless the user has set another meanwhile."""
        if owner.__dict__.get(name) is not self._installed:
            return
        if self._before is _MISSING:
            del owner.__dict__[name]
        else:
            owner.__dict__[name] = self._before
