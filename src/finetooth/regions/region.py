"""Regions: three shapes of "part of a tensor". NumPy only, no backend.

`Whole` is every element, `Grid` is the outer product of one axis choice per dimension (rows, columns, blocks,
heads), `Points` is any other set of elements. A region knows the shape of the tensor it belongs to, never its values,
so every operation costs what the region holds and not what the tensor holds, `~` and `mask` apart.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import SelectionError
from . import axis as along
from .axis import Axis


class Region(abc.ABC):
    """A set of elements of a tensor of a given shape. Immutable; compares and hashes by its elements.

    >>> rows = Grid((4, 6), [range(0, 2), range(6)])
    >>> columns = Grid((4, 6), [range(4), [0, 1, 5]])
    >>> rows & columns
    Grid((4, 6), [0:2, [0,1,5]])
    >>> (rows | columns).size, (rows - columns).size, (~rows).size
    (18, 6, 12)
    """

    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements in the region."""
        return math.prod(self.compact_shape)

    @property
    @abc.abstractmethod
    def compact_shape(self) -> tuple[int, ...]:
        """The shape of the gathered values."""

    @abc.abstractmethod
    def flat(self) -> np.ndarray:
        """Return the region as sorted flat int64 indices."""

    @abc.abstractmethod
    def gather(self, array: np.ndarray) -> np.ndarray:
        """Return a copy of the region's values, in `compact_shape`."""

    @abc.abstractmethod
    def scatter(self, array: np.ndarray, compact: np.ndarray) -> np.ndarray:
        """Return a copy of `array` with the region's values replaced: `gather(scatter(a, c)) == c`."""

    @abc.abstractmethod
    def text(self) -> str:
        """Write the region as the text of an index, abbreviated where it is long."""

    def mask(self) -> np.ndarray:
        """Return the region as a boolean array of the tensor's shape."""
        return self.scatter(np.zeros(self.shape, bool), np.ones(self.compact_shape, bool))

    def __contains__(self, index: Sequence[int]) -> bool:
        """Test whether the element at these coordinates, one integer from 0 up per axis, is in the region."""
        if len(index) != len(self.shape) or any(not 0 <= i < n for i, n in zip(index, self.shape)):
            return False
        return bool(_members(self, np.array([_flatten(index, self.shape)], np.int64))[0])

    def __and__(self, other: Region) -> Region:
        _check_same_shape(self, other)
        mine, theirs = _axes(self), _axes(other)
        if mine is not None and theirs is not None:
            return grid(self.shape, [along.intersect(a, b) for a, b in zip(mine, theirs)])
        small, large = sorted((self, other), key=lambda region: region.size)
        flat = small.flat()
        return points(self.shape, flat[_members(large, flat)])

    def __or__(self, other: Region) -> Region:
        _check_same_shape(self, other)
        if other <= self:
            return self
        if self <= other:
            return other
        merged = _along_one_axis(self, other, np.union1d)
        if merged is not None:
            return merged
        return points(self.shape, np.concatenate([self.flat(), other.flat()]))

    def __sub__(self, other: Region) -> Region:
        _check_same_shape(self, other)
        if self <= other:
            return empty(self.shape)
        overlap = self & other
        if not overlap.size:
            return self
        rest = _along_one_axis(self, overlap, np.setdiff1d)
        if rest is not None:
            return rest
        flat = self.flat()
        return points(self.shape, flat[~_members(overlap, flat)])

    def __invert__(self) -> Region:
        return Whole(self.shape) - self

    def __le__(self, other: Region) -> bool:
        """Test whether every element of this region is in the other."""
        _check_same_shape(self, other)
        if isinstance(other, Whole) or not self.size:
            return True
        if self.size > other.size:
            return False
        mine, theirs = _axes(self), _axes(other)
        if mine is not None and theirs is not None:
            return all(len(along.intersect(a, b)) == len(a) for a, b in zip(mine, theirs))
        return bool(_members(other, self.flat()).all())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Region):
            return NotImplemented
        return self.shape == other.shape and self.size == other.size and self <= other

    def __hash__(self) -> int:
        return hash((self.shape, self.size))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape}, {self.text()})"

    @abc.abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-safe data; `Region.from_dict` is the inverse."""

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Region:
        """Make the region that `to_dict` described; raises a `SelectionError` for any other data."""
        try:
            shape = tuple(along.integers(list(data["shape"])).tolist())
            if "axes" in data:
                return grid(shape, [range(*a["range"]) if isinstance(a, dict) else a for a in data["axes"]])
            return points(shape, data["points"]) if "points" in data else Whole(shape)
        except SelectionError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise SelectionError(f"This is not the plain form of a region: {error!r}.") from None


class Whole(Region):
    """Every element of the tensor."""

    def __init__(self, shape: Iterable[int]):
        self.shape = _shape(shape)

    @property
    def compact_shape(self) -> tuple[int, ...]:
        return self.shape

    def flat(self) -> np.ndarray:
        return np.arange(self.size, dtype=np.int64)

    def gather(self, array: np.ndarray) -> np.ndarray:
        _check_fits(self, array)
        return np.array(array)

    def scatter(self, array: np.ndarray, compact: np.ndarray) -> np.ndarray:
        _check_fits(self, array)
        return np.array(np.broadcast_to(compact, self.shape), dtype=array.dtype)

    def text(self) -> str:
        return "[...]"

    def to_dict(self) -> dict[str, Any]:
        return {"shape": list(self.shape)}


class Grid(Region):
    """The outer product of a range or distinct indices per axis. `grid` picks a cheaper shape where there is one."""

    def __init__(self, shape: Iterable[int], axes: Sequence[Axis | Sequence[int]]):
        self.shape = _shape(shape)
        if len(axes) != len(self.shape):
            raise SelectionError(f"A grid on shape {self.shape} needs {len(self.shape)} axes; received {len(axes)}.")
        self.axes = tuple(along.choice(axis, n) for axis, n in zip(axes, self.shape))

    def __reduce__(self) -> tuple[Any, ...]:
        return Grid, (self.shape, self.axes)

    @property
    def compact_shape(self) -> tuple[int, ...]:
        return tuple(len(axis) for axis in self.axes)

    def flat(self) -> np.ndarray:
        flat = np.zeros((1,) * len(self.shape), np.int64)
        for axis, index, stride in zip(range(len(self.shape)), self.axes, _strides(self.shape)):
            part = np.asarray(index, np.int64) * stride
            flat = flat + part.reshape([-1 if i == axis else 1 for i in range(len(self.shape))])
        return flat.reshape(-1)

    def index(self) -> tuple[Any, ...]:
        """Return an index for NumPy that addresses the region: slices where possible, an open mesh otherwise."""
        if all(isinstance(axis, range) for axis in self.axes):
            return tuple(slice(axis.start, axis.stop, axis.step) for axis in self.axes if isinstance(axis, range))
        return np.ix_(*(np.asarray(axis) for axis in self.axes))

    def gather(self, array: np.ndarray) -> np.ndarray:
        _check_fits(self, array)
        return np.array(array[self.index()])

    def scatter(self, array: np.ndarray, compact: np.ndarray) -> np.ndarray:
        _check_fits(self, array)
        array = np.array(array)
        array[self.index()] = compact
        return array

    def text(self) -> str:
        return "[" + ", ".join(along.text(axis, n) for axis, n in zip(self.axes, self.shape)) + "]"

    def to_dict(self) -> dict[str, Any]:
        axes = [
            {"range": [a.start, a.stop, a.step]} if isinstance(a, range) else [int(i) for i in a] for a in self.axes
        ]
        return {"shape": list(self.shape), "axes": axes}


class Points(Region):
    """Any set of elements, as sorted unique flat int64 indices. `points` picks a cheaper shape where there is one."""

    def __init__(self, shape: Iterable[int], flat: np.ndarray | Sequence[int]):
        self.shape = _shape(shape)
        index = along.distinct(along.integers(flat))
        size = math.prod(self.shape)
        if index.size and (index[0] < 0 or index[-1] >= size):
            raise SelectionError(f"Flat indices run from {index[0]} to {index[-1]}; shape {self.shape} holds {size}.")
        index.setflags(write=False)
        self._flat = index

    def __reduce__(self) -> tuple[Any, ...]:
        return Points, (self.shape, self._flat)

    @property
    def compact_shape(self) -> tuple[int, ...]:
        return self._flat.shape

    def flat(self) -> np.ndarray:
        return self._flat

    def coordinates(self) -> tuple[np.ndarray, ...]:
        """Return the points as one int64 index array per axis."""
        return _unravel(self._flat, self.shape)

    def gather(self, array: np.ndarray) -> np.ndarray:
        _check_fits(self, array)
        return np.array(array.reshape(-1)[self._flat])

    def scatter(self, array: np.ndarray, compact: np.ndarray) -> np.ndarray:
        _check_fits(self, array)
        array = np.array(array, order="C")  # so that the flat view below is a view
        array.reshape(-1)[self._flat] = compact
        return array

    def text(self) -> str:
        return f"{self.size:,} points"

    def to_dict(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "points": self._flat.tolist()}


def empty(shape: Iterable[int]) -> Region:
    """Return the region without elements."""
    return Points(shape, np.zeros(0, np.int64))


def grid(shape: Iterable[int], axes: Sequence[Axis | Sequence[int]]) -> Region:
    """Return the outer product of one choice per axis in its cheapest shape: `Whole`, `Grid`, or the empty region.

    >>> grid((3, 4), [range(3), [1, 3]]), grid((3, 4), [range(3), range(4)])
    (Grid((3, 4), [:, 1:4:2]), Whole((3, 4), [...]))
    """
    region = Grid(shape, axes)
    if any(not len(axis) for axis in region.axes):
        return empty(region.shape)
    return Whole(region.shape) if region.compact_shape == region.shape else region


def points(shape: Iterable[int], flat: np.ndarray | Sequence[int]) -> Region:
    """Make the cheapest region of these flat indices: `Whole`, `Grid` where they form one, else `Points`.

    >>> points((3, 4), [1, 3, 9, 11])
    Grid((3, 4), [0:3:2, 1:4:2])
    """
    region = Points(shape, flat)
    if not region.size:
        return region
    axes, product = [], 1
    for coordinate in region.coordinates():
        axes.append(along.distinct(coordinate))
        product *= len(axes[-1])
        if product > region.size:
            return region
    return grid(region.shape, axes)


def _shape(shape: Iterable[int]) -> tuple[int, ...]:
    shape = tuple(int(n) for n in shape)
    if any(n < 0 for n in shape):
        raise SelectionError(f"{shape} is not the shape of a tensor.")
    return shape


def _axes(region: Region) -> tuple[Axis, ...] | None:
    if isinstance(region, Whole):
        return tuple(range(n) for n in region.shape)
    return region.axes if isinstance(region, Grid) else None


def _along_one_axis(a: Region, b: Region, combine: Callable[[Any, Any], np.ndarray]) -> Region | None:
    """Combine two grids that differ in one axis only along it; None for any other pair."""
    mine, theirs = _axes(a), _axes(b)
    if mine is None or theirs is None:
        return None
    differing = [i for i, (x, y) in enumerate(zip(mine, theirs)) if not np.array_equal(x, y)]
    if len(differing) != 1:
        return None
    (one,) = differing
    return grid(a.shape, [combine(x, y) if i == one else x for i, (x, y) in enumerate(zip(mine, theirs))])


def _members(region: Region, flat: np.ndarray) -> np.ndarray:
    """Test each flat index for membership in the region; returns a boolean array."""
    axes = _axes(region)
    if axes is None:
        return along.holds(region.flat(), flat)
    inside = np.ones(flat.shape, bool)
    for axis, coordinate in zip(axes, _unravel(flat, region.shape)):
        inside &= along.holds(axis, coordinate)
    return inside


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _flatten(index: Sequence[int], shape: tuple[int, ...]) -> int:
    return sum(int(i) * stride for i, stride in zip(index, _strides(shape)))


def _unravel(flat: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return tuple((flat // stride) % n for stride, n in zip(_strides(shape), shape))


def _check_fits(region: Region, array: np.ndarray) -> None:
    if tuple(array.shape) != region.shape:
        raise SelectionError(f"A region of shape {region.shape} does not fit an array of shape {tuple(array.shape)}.")


def _check_same_shape(a: Region, b: Region) -> None:
    if not isinstance(b, Region):
        raise SelectionError(f"A region combines with another region; received {type(b).__name__}.")
    if a.shape != b.shape:
        raise SelectionError(f"Regions of tensors of different shapes do not combine: {a.shape} and {b.shape}.")
