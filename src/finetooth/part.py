"""Part: a compact variable standing for a region of a base variable."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from .backends import backend, keras_private
from .region import Grid, Points, Region

FULL_PRECISION = ("float32", "float64")


class Place:
    """A region, ready for tensors of the current backend: `gather` and `scatter` as `Region` has them for arrays."""

    def __init__(self, region: Region):
        self.points: Any = None
        self.axes: list[tuple[int, Any]] = []
        if isinstance(region, Points):
            self.points = backend.coordinates(region.coordinates())
        elif isinstance(region, Grid):
            for axis, (chosen, length) in enumerate(zip(region.axes, region.shape)):
                if len(chosen) == length:
                    continue
                contiguous = isinstance(chosen, range) and chosen.step == 1
                where = chosen if contiguous else backend.index(np.asarray(chosen), length)
                self.axes.append((axis, where))

    def gather(self, value: Any) -> Any:
        """The region's elements, in compact shape."""
        if self.points is not None:
            return backend.take_points(value, self.points)
        for axis, where in self.axes:
            value = backend.take(value, axis, where)
        return value

    def scatter(self, value: Any, compact: Any) -> Any:
        """`value` with the region's elements replaced; differentiable in `compact` only."""
        value = keras.ops.stop_gradient(value)
        if self.points is not None:
            return backend.put_points(value, self.points, compact)
        return backend.put(value, self.axes, compact) if self.axes else compact


class Part:
    """A region of a base variable as a small trainable variable of its own.

    The compact variable has the region's shape and the base's dtype, or float32 where the base is of lower precision,
    so that small updates are not rounded away. The base variable's regularizer and constraint act on the merged
    tensor, as they would on a plain variable, and reach the compact one as far as its elements go.
    """

    def __init__(self, base: keras.Variable, region: Region, value: np.ndarray):
        self.base = base
        self.region = region
        self.place = Place(region)
        dtype = keras.backend.standardize_dtype(base.dtype)
        wide = dtype if dtype in FULL_PRECISION else "float32"
        *scopes, name = base.path.split("/")
        self.variable = _variable_in(scopes, value.astype(wide), wide, f"{name}_part")
        setattr(self.variable, keras_private.PART, True)
        if base.regularizer is not None:
            self.variable.regularizer = lambda _: base.regularizer(base.value)
        if base.constraint is not None:
            self.variable.constraint = self._constraint()

    def merge(self, base_value: Any, value: Any = None) -> Any:
        """The base's value with the part in place, or another value for it; differentiable in the part only."""
        compact = keras.ops.cast(self.variable.value if value is None else value, base_value.dtype)
        return self.place.scatter(base_value, compact)

    def current(self) -> np.ndarray:
        """The part's value as the merged tensor holds it: in the base's dtype, in compact shape."""
        return np.array(keras.ops.convert_to_numpy(keras.ops.cast(self.variable.value, self.base.dtype)))

    def load(self, base_value: Any) -> None:
        """Set the part to its region of a whole tensor."""
        self.variable.assign(self.place.gather(keras.ops.convert_to_tensor(base_value)))

    def _constraint(self) -> Any:
        # Constraints run inside the optimizer's step, where JAX has no access to the base: keep its frozen elements.
        frozen = keras.ops.copy(keras.ops.convert_to_tensor(self.base.value))
        constraint, place = self.base.constraint, self.place

        def constrained(variable: Any) -> Any:
            compact = keras.ops.convert_to_tensor(variable)
            merged = place.scatter(keras.ops.cast(frozen, compact.dtype), compact)
            return place.gather(constraint(merged))

        return constrained


def _variable_in(scopes: list[str], value: np.ndarray, dtype: str, name: str) -> keras.Variable:
    if scopes:
        with keras.name_scope(scopes[0]):
            return _variable_in(scopes[1:], value, dtype, name)
    return keras.Variable(value, dtype=dtype, trainable=True, name=name)
