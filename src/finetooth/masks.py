"""The mask that layers have attached to a tensor."""

from __future__ import annotations

import functools
from typing import Any

import keras


def mask_of(tensor: Any) -> Any:
    """The mask, or None. Keras gives a layer the mask of its input, and has no other public way to ask for it."""
    reader = _reader()
    reader(tensor)
    mask, reader.__dict__["found"] = reader.found, None
    return mask


class _MaskReader(keras.Layer):
    def __init__(self) -> None:
        super().__init__(name="mask_reader", autocast=False)
        self.supports_masking = True
        self.found: Any = None

    def call(self, x: Any, mask: Any = None) -> Any:
        self.__dict__["found"] = mask
        return x


@functools.cache
def _reader() -> _MaskReader:
    return _MaskReader()
