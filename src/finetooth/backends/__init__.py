"""The backend that Keras runs on, chosen once by Keras."""

from __future__ import annotations

import importlib
from typing import cast

import keras

from ..errors import FinetoothError
from .contract import Backend as Backend

SUPPORTED = ("tensorflow", "jax", "torch")

if keras.backend.backend() not in SUPPORTED:
    raise FinetoothError(
        f"Keras runs on {keras.backend.backend()!r}, which trains nothing. Set KERAS_BACKEND to one of "
        f"{', '.join(SUPPORTED)} before keras is imported."
    )
backend = cast(Backend, importlib.import_module(f"{__name__}.{keras.backend.backend()}"))
