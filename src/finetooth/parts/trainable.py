"""TrainablePart: the part of a model's variable that a tuning trains in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from ..backends import backend
from ..backends.tensor_region import TensorRegion, wide
from ..keras_internals import marks
from ..keras_internals import private as keras_private
from ..regions import bits
from ..regions.region import Region


class TrainablePart:
    """A region of a base variable as a small trainable variable of its own.

    The compact variable has the region's shape and the base's dtype, or float32 where the base is of lower precision,
    so that small updates are not rounded away. A variable of an earlier tuning may be used again. The base variable's
    regularizer and constraint act on the merged tensor, as they would on a plain variable, and reach the compact one as
    far as its elements go.
    """

    def __init__(self, base: keras.Variable, region: Region, value: np.ndarray, variable: keras.Variable | None = None):
        self.base = base
        self.region = region
        self.tensor_region = TensorRegion(region)
        dtype = wide(keras.backend.standardize_dtype(base.dtype))
        *scopes, name = base.path.split("/")
        if variable is None:
            self.variable = _variable_in(scopes, value.astype(dtype), dtype, f"{name}_part")
        else:
            self.variable = variable
            self._reset(value)
        setattr(self.variable, marks.PART, True)
        self.link = backend.Link(self)
        self.passed_as_state = False  # whether a loop of the user's own passes the base to `stateless_call`
        if base.regularizer is not None:
            self.variable.regularizer = lambda _: base.regularizer(base.value)
        if base.constraint is not None:
            self.variable.constraint = self._constrained
        # Constraints run inside the optimizer's step, where JAX has no access to the base: keep its frozen elements.
        # They are constants of what is compiled, so whoever compiles is told when they change.
        keeps_copy = base.constraint is not None and not self.link.base_is_current
        self._frozen = _copy(base.value) if keeps_copy else None
        self.on_frozen_changed: Callable[[], None] = lambda: None

    def merge(self, base_value: Any, value: Any = None) -> Any:
        """The base's value with the part in place, or another value for it; differentiable in the part only."""
        compact = keras.ops.cast(self.variable.value if value is None else value, base_value.dtype)
        return self.tensor_region.scatter(base_value, compact)

    def current(self) -> np.ndarray:
        """The part's value as the merged tensor holds it: in the base's dtype, in compact shape."""
        return np.array(keras.ops.convert_to_numpy(keras.ops.cast(self.variable.value, self.base.dtype)))

    def load(self, base_value: Any) -> None:
        """Set the part to its region of a whole tensor, which the base has been assigned."""
        self.variable.assign(self.tensor_region.gather(keras.ops.convert_to_tensor(base_value)))
        if self._frozen is not None:
            self._frozen = _copy(base_value)
            self.on_frozen_changed()

    def _reset(self, value: np.ndarray) -> None:
        """Set the part to values of the base's dtype. Elements that round to theirs already keep their precision."""
        known = np.array(keras.ops.convert_to_numpy(self.variable))
        self.variable.assign(np.where(bits.differing(self.current(), value), value.astype(known.dtype), known))

    def _constrained(self, variable: Any) -> Any:
        """Apply the base's constraint to the merged tensor, and return the part's elements of it."""
        compact = keras.ops.convert_to_tensor(variable)
        whole = keras_private.raw_value(self.base) if self._frozen is None else self._frozen
        merged = self.tensor_region.scatter(keras.ops.cast(whole, compact.dtype), compact)
        return self.tensor_region.gather(self.base.constraint(merged))


def _copy(value: Any) -> Any:
    return keras.ops.copy(keras.ops.convert_to_tensor(value))


def _variable_in(scopes: list[str], value: np.ndarray, dtype: str, name: str) -> keras.Variable:
    if scopes:
        with keras.name_scope(scopes[0]):
            return _variable_in(scopes[1:], value, dtype, name)
    return keras.Variable(value, dtype=dtype, trainable=True, name=name)
