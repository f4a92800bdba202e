"""Whose code a call of a layer runs: Keras' or the user's."""

from __future__ import annotations

import types
from typing import Any

import keras

from .hooks import replaced

_METHODS = ("call", "convolution_op")  # Keras documents the second as one that convolutions may override


def is_keras_call(layer: keras.Layer) -> bool:
    """Test whether a call of the layer runs Keras' own code: neither a subclass nor a patch has put in another."""
    kinds = type(layer).__mro__
    defined = [vars(kind)[name] for kind in kinds for name in _METHODS if name in vars(kind)]
    return all(map(_is_keras_function, defined)) and not any(replaced(layer, name) for name in _METHODS)


def _is_keras_function(function: Any) -> bool:
    """Test by the function's globals: `functools.wraps` copies `__module__` to a user's wrapper."""
    return isinstance(function, types.FunctionType) and function.__globals__["__name__"].startswith("keras.")
