"""Choices along one axis: an increasing range, or sorted unique int64 indices. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import SelectionError, brief

Axis = range | np.ndarray


def as_array(values: Any) -> np.ndarray:
    """Convert an index that is no slice to an array; refuse nested lists of unequal lengths."""
    try:
        return np.asarray(values)
    except ValueError as error:
        raise SelectionError(f"Expected integers, a slice or a mask; received {brief(values)}: {error}") from None


def integers(values: Any) -> np.ndarray:
    """Convert the values to flat int64; refuse any that is not an integer of that range."""
    array = as_array(values)
    if array.size and (not np.issubdtype(array.dtype, np.integer) or array.max() > np.iinfo(np.int64).max):
        raise SelectionError(f"Expected integers; received {brief(values)}.")
    return array.astype(np.int64).reshape(-1)


def distinct(index: np.ndarray) -> np.ndarray:
    """Sort the indices and drop repeated ones. `np.unique` hashes, which is many times slower on millions of them."""
    if (index[1:] > index[:-1]).all():
        return index
    index = np.sort(index)
    return index[np.append(True, index[1:] != index[:-1])]


def choice(axis: Axis | Sequence[int], n: int) -> Axis:
    """Return the choice in its cheapest form: a range wherever the indices are evenly spaced."""
    if isinstance(axis, range):
        axis = axis if axis.step > 0 else axis[::-1]
    else:
        axis = distinct(integers(axis))
        steps = np.diff(axis)
        if axis.size and (not steps.size or (steps == steps[0]).all()):
            step = int(steps[0]) if steps.size else 1
            axis = range(int(axis[0]), int(axis[-1]) + 1, step)
    if len(axis) and (axis[0] < 0 or axis[-1] >= n):
        raise SelectionError(f"Indices {axis[0]} to {axis[-1]} do not fit an axis of size {n}.")
    if isinstance(axis, np.ndarray):
        axis.setflags(write=False)
        return axis
    return range(axis[0], axis[-1] + 1, axis.step if len(axis) > 1 else 1) if len(axis) else axis


def chosen_by(entry: Any, n: int, axis: int) -> Axis:
    """Resolve one entry of a NumPy-like index, along axis number `axis` of size `n`.

    Returns:
        The indices in the order in which the entry names them; negative ones are counted from the end.

    Raises:
        SelectionError: if the entry is out of range, or neither integers, a slice nor a mask of the axis.
    """
    if isinstance(entry, slice):
        try:
            return range(n)[entry]
        except (TypeError, ValueError) as error:
            raise SelectionError(f"Axis {axis}: {error} in {entry}.") from None
    index = as_array(entry)
    if index.dtype == bool:
        if index.shape != (n,):
            raise SelectionError(f"Axis {axis} has size {n}; received a mask of shape {index.shape}.")
        return np.flatnonzero(index)
    if index.ndim > 1 or (index.size and not np.issubdtype(index.dtype, np.integer)):
        raise SelectionError(f"Axis {axis}: expected integers, a slice or a mask; received {brief(entry)}.")
    index = integers(index)
    outside = index[(index < -n) | (index >= n)]
    if outside.size:
        raise SelectionError(f"Index {outside[0]} is out of range for axis {axis} of size {n}.")
    return np.where(index < 0, index + n, index)


def intersect(a: Axis, b: Axis) -> Axis:
    """Return the indices that are in both choices."""
    if isinstance(a, range) and isinstance(b, range) and a.step == b.step == 1:
        return range(max(a.start, b.start), max(min(a.stop, b.stop), max(a.start, b.start)))
    return np.intersect1d(np.asarray(a), np.asarray(b), assume_unique=True)


def holds(axis: Axis, index: np.ndarray) -> np.ndarray:
    """Test each index for membership in the choice; returns a boolean array."""
    if isinstance(axis, range):
        return (index >= axis.start) & (index < axis.stop) & ((index - axis.start) % axis.step == 0)
    if not len(axis):
        return np.zeros(index.shape, bool)
    return axis[np.minimum(np.searchsorted(axis, index), len(axis) - 1)] == index


def text(axis: Axis, n: int) -> str:
    """Write the choice as the text of an index, abbreviated where it is long."""
    if len(axis) == n:
        return ":"
    if isinstance(axis, range):
        if len(axis) == 1:
            return str(axis[0])
        return f"{axis.start}:{axis.stop}" + (f":{axis.step}" if axis.step > 1 else "")
    shown = [str(i) for i in axis[:6]] + (["..."] if len(axis) > 6 else [])
    return "[" + ",".join(shown) + "]" + (f" ({len(axis)})" if len(axis) > 6 else "")
