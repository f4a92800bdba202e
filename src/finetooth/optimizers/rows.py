"""Rows: a variable for as many rows of another as a batch uses."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ..backends import backend


class Rows(keras.Variable):
    """As many rows as it was last given, where Keras' variables have a shape for good. Holds nothing between steps."""

    def __init__(self, like: Any):
        dtype = keras.backend.standardize_dtype(like.dtype)
        name = str(like.name).replace("/", "_").replace(":", "_")
        with backend.outside_of_graphs():
            super().__init__(np.zeros((0, *like.shape[1:])), dtype=dtype, trainable=False, name=f"{name}_rows")
        self._rows: Any = None

    @property
    def value(self) -> Any:
        return super().value if self._rows is None else self._rows

    @property
    def shape(self) -> Any:
        return self.value.shape  # of the backend's own kind, which Keras' operations for TensorFlow insist on

    def assign(self, value: Any) -> Any:
        fits = keras.backend.standardize_dtype(value.dtype) == self.dtype  # a cast to the same is not free on PyTorch
        self._rows = value if fits else keras.ops.cast(value, self.dtype)
        return self._rows

    def taken(self) -> Any:
        """The rows, which are not kept."""
        rows, self._rows = self.value, None
        return rows
