"""The backend that Keras runs on, chosen once by Keras."""

from __future__ import annotations

import importlib
from typing import cast

import keras

from .base import Backend as Backend

backend = cast(Backend, importlib.import_module(f"{__name__}.{keras.backend.backend()}"))
