"""A NumPy-like index to the region it addresses. NumPy only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import SelectionError
from . import axis as along
from .index_text import MAX_LENGTH, read_index
from .region import Region, grid, points


def region_at(shape: Iterable[int], index: Any) -> Region:
    """Return the region that a NumPy-like index addresses.

    Index lists on several axes mean their outer product, so `[[0, 2], [1, 3]]` is four elements and not two.

    Args:
        shape: The shape of the array.
        index: Integers, slices, `...`, index lists or boolean arrays; a tuple of them for several axes.

    Returns:
        The region. Elements that are named twice are in it once.

    Raises:
        SelectionError: if the index does not fit the shape.

    >>> region_at((8, 4), np.s_[2:5, [0, 3]])
    Grid((8, 4), [2:5, 0:4:3])
    """
    shape = tuple(int(n) for n in shape)
    index = _array_or(index)
    if _is_whole_mask(index, shape):
        return points(shape, np.flatnonzero(index))
    entries = _entries(shape, index)
    return grid(shape, [along.chosen_by(entry, n, axis) for axis, (entry, n) in enumerate(zip(entries, shape))])


@dataclass(frozen=True)
class IndexView:
    """The elements of a region in the shape and the order in which an index names them, as in NumPy.

    Along each axis of the region, `orders` has the positions of its sorted indices among those named, or None where
    they are the same.
    """

    region: Region
    shape: tuple[int, ...]
    orders: tuple[np.ndarray | None, ...] = ()


def resolve_index(shape: Iterable[int], index: Any) -> IndexView:
    """Return the elements that an index addresses, in the shape and order in which it names them.

    Args:
        shape: The shape of the array.
        index: An index as `region_at` takes it, the text of one, or a region.

    Returns:
        The region, and how an array of the named elements is ordered relative to it.

    Raises:
        SelectionError: if the index does not fit the shape, or names an element twice.

    >>> resolve_index((8, 4), np.s_[[5, 2], 0])
    IndexView(region=Grid((8, 4), [2:6:3, 0]), shape=(2,), orders=(array([1, 0]), None))
    """
    shape = tuple(int(n) for n in shape)
    if isinstance(index, str):
        index = _from_text(index)
    if isinstance(index, Region):
        if index.shape != shape:
            raise SelectionError(f"The region belongs to shape {index.shape}; the variable has {shape}.")
        return IndexView(index, index.compact_shape)
    index = _array_or(index)
    if _is_whole_mask(index, shape):
        region = points(shape, np.flatnonzero(index))
        return IndexView(region, (region.size,))
    entries = _entries(shape, index)
    named = [along.chosen_by(entry, n, axis) for axis, (entry, n) in enumerate(zip(entries, shape))]
    kept = [len(choice) for entry, choice in zip(entries, named) if isinstance(entry, slice) or np.ndim(entry)]
    return IndexView(grid(shape, named), tuple(kept), tuple(_order(choice, axis) for axis, choice in enumerate(named)))


def _order(named: along.Axis, axis: int) -> np.ndarray | None:
    if isinstance(named, range):
        return None if named.step > 0 or len(named) < 2 else np.arange(len(named))[::-1].copy()
    order = np.argsort(named, kind="stable")
    ordered = named[order]
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if repeated.size:
        raise SelectionError(f"Axis {axis}: index {repeated[0]} is named more than once. Name each element once.")
    return None if (order[1:] > order[:-1]).all() else order


def _array_or(index: Any) -> Any:
    return along.as_array(index) if isinstance(index, list) or hasattr(index, "__array__") else index


def _is_whole_mask(index: Any, shape: tuple[int, ...]) -> bool:
    """Tell a mask of the whole shape from other indices; refuse a mask that fits neither the shape nor an axis."""
    if not isinstance(index, np.ndarray) or index.dtype != bool:
        return False
    if index.shape != shape and index.ndim != 1:
        raise SelectionError(f"A mask of shape {index.shape} does not fit a tensor of shape {shape}.")
    return index.shape == shape


def _entries(shape: tuple[int, ...], index: Any) -> list[Any]:
    """One entry of the index for each axis."""
    entries = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if len(dots) > 1:
        raise SelectionError("An index holds at most one `...`.")
    given = len(entries) - len(dots)
    if given > len(shape):
        raise SelectionError(f"{given} indices for a tensor of rank {len(shape)} and shape {shape}.")
    fill = [slice(None)] * (len(shape) - given)
    where = dots[0] if dots else len(entries)
    return entries[:where] + fill + entries[where + len(dots) :]


def _from_text(text: str) -> tuple[Any, ...]:
    stripped = text.strip()
    if not stripped.startswith("["):
        raise SelectionError(f'Expected the text of an index, such as "[:, :64]"; received {text!r:.200}.')
    if len(stripped) > MAX_LENGTH:
        raise SelectionError(f"The text of an index is limited to {MAX_LENGTH} characters.")
    return read_index(stripped)
