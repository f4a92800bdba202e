"""TensorRegion: a region, ready for tensors of the current backend."""

from __future__ import annotations

import functools
import math
from typing import Any

import keras
import numpy as np

from ..regions.region import Grid, Points, Region, Whole, grid
from . import backend


class TensorRegion:
    """`gather` and `scatter` as `Region` has them for arrays."""

    def __init__(self, region: Region):
        self.region = region
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

    @property
    def is_whole(self) -> bool:
        return self.points is None and not self.axes

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

    def gather_gradient(self, gradient: Any) -> Any:
        """The region's elements of a gradient, which may be sparse: rows that repeat are summed."""
        sparse = backend.sparse_rows(gradient)
        if sparse is None:
            return self.gather(gradient)
        indices, values = sparse
        rows, within = self._rows
        slots = keras.ops.searchsorted(rows, keras.ops.cast(indices, rows.dtype))
        found = keras.ops.take(rows, keras.ops.minimum(slots, len(rows) - 1), axis=0)
        slots = keras.ops.where(keras.ops.equal(found, keras.ops.cast(indices, rows.dtype)), slots, len(rows))
        return within.gather(keras.ops.segment_sum(values, slots, len(rows) + 1)[: len(rows)])

    @functools.cached_property
    def leading(self) -> Any:
        """The coordinates of a grid along its axes up to the last that is restricted, for one write to all of them."""
        last = self.axes[-1][0]
        axes = self.region.axes[: last + 1] if isinstance(self.region, Grid) else ()
        mesh = np.meshgrid(*map(np.asarray, axes), indexing="ij")
        with backend.outside_of_graphs():
            return backend.coordinates(tuple(mesh))

    @functools.cached_property
    def _rows(self) -> tuple[Any, TensorRegion]:
        """The rows that hold elements of the region, and where in them those are."""
        region, rest = self.region, self.region.shape[1:]
        if isinstance(region, Points):
            first, *others = region.coordinates()
            rows, numbers = np.unique(first, return_inverse=True)
            flat = np.ravel_multi_index((numbers, *others), (len(rows), *rest))
            within: Region = Points((len(rows), *rest), flat)
        else:
            axes = region.axes if isinstance(region, Grid) else tuple(range(n) for n in region.shape)
            rows = np.asarray(axes[0])
            within = grid((len(rows), *rest), [range(len(rows)), *axes[1:]])
        with backend.outside_of_graphs():  # they are kept
            return keras.ops.convert_to_tensor(rows, "int32"), TensorRegion(within)


def read_region(variable: keras.Variable, region: Region) -> np.ndarray:
    """Read a region of a variable, in compact shape, without a copy of the rest."""
    if _is_dense(region):
        return region.gather(np.asarray(keras.ops.convert_to_numpy(variable)))
    return np.array(keras.ops.convert_to_numpy(backend.read(variable, TensorRegion(region))))


def write_region(variable: keras.Variable, region: Region, compact: np.ndarray) -> None:
    """Write a region of a variable, in place where the backend can."""
    if _is_dense(region):
        variable.assign(region.scatter(np.asarray(keras.ops.convert_to_numpy(variable)), compact))
    else:
        backend.write(variable, TensorRegion(region), keras.ops.convert_to_tensor(compact, variable.dtype))


def _is_dense(region: Region) -> bool:
    """Whether the coordinates of single elements would take more memory than the variable itself."""
    return isinstance(region, Points) and 2 * len(region.shape) * region.size > math.prod(region.shape)


def assign_whole(variable: Any, value: Any) -> None:
    """Assign a variable, of the backend's own or Keras', also where several replicas do so."""
    backend.write(variable, TensorRegion(Whole(variable.shape)), value)


def wide(dtype: str) -> str:
    """The dtype in which elements of this one are trained: not one so coarse that small updates are rounded away."""
    return dtype if dtype in ("float32", "float64") else "float32"
