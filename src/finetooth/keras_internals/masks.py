"""Keras masks of tensors: read and attach them through layers, which is the only public way.

Keras keeps a mask as an attribute of the tensor where that is allowed, and in a table where it is not, as for the
tensors of a function that JAX traces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras


def mask_of(tensor: Any) -> Any:
    """Return the Keras mask of a tensor, or None."""
    reader = _layers.reader
    reader(tensor)
    return reader.taken()


def with_mask(tensor: Any, mask: Any) -> Any:
    """Attach a Keras mask, if it is not None, to a tensor that has none. Returns the tensor."""
    if mask is None:
        return tensor
    setter = _layers.setter
    setter.__dict__["mask"] = mask
    try:
        return setter(tensor)
    finally:
        setter.__dict__["mask"] = None


def keeping_mask(function: Callable[[Any], Any], tensor: Any) -> Any:
    """Apply a function to a tensor; the result has the tensor's Keras mask."""
    return with_mask(function(tensor), mask_of(tensor))


class _MaskReader(keras.Layer):
    def __init__(self) -> None:
        super().__init__(name="mask_reader", autocast=False)
        self.supports_masking = True
        self.__dict__["found"] = None  # past Keras' tracking

    def call(self, x: Any, mask: Any = None) -> Any:
        self.__dict__["found"] = mask
        return x

    def taken(self) -> Any:
        found, self.__dict__["found"] = self.__dict__["found"], None
        return found


class _MaskSetter(keras.Layer):
    def __init__(self) -> None:
        super().__init__(name="mask_setter", autocast=False)
        self.__dict__["mask"] = None

    def call(self, x: Any) -> Any:
        return x

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        return self.__dict__["mask"]


class _Layers(threading.local):
    """The two layers, for each thread its own: they hold a mask for a moment."""

    def __init__(self) -> None:
        self.reader, self.setter = _MaskReader(), _MaskSetter()


_layers = _Layers()
