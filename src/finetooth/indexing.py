"""A NumPy-like index to the region it addresses. NumPy only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from . import axis as along
from .errors import SelectionError
from .region import Grid, Region, points


def at(shape: Iterable[int], index: Any) -> Region:
    """The region a NumPy-like index addresses: integers, slices, `...`, index lists, boolean arrays.

    Index lists on several axes mean their outer product, so `[[0, 2], [1, 3]]` is four elements and not two.

    >>> at((8, 4), np.s_[2:5, [0, 3]])
    Grid((8, 4), [2:5, 0:4:3])
    """
    shape = tuple(int(n) for n in shape)
    if isinstance(index, list) or hasattr(index, "__array__"):
        index = along.as_array(index)
    if isinstance(index, np.ndarray) and index.dtype == bool:
        mask = index
        if mask.shape == shape:
            return points(shape, np.flatnonzero(mask))
        if mask.ndim != 1:
            raise SelectionError(f"A mask of shape {mask.shape} does not fit a tensor of shape {shape}.")
    entries = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if len(dots) > 1:
        raise SelectionError("An index holds at most one `...`.")
    given = len(entries) - len(dots)
    if given > len(shape):
        raise SelectionError(f"{given} indices for a tensor of rank {len(shape)} and shape {shape}.")
    fill = [slice(None)] * (len(shape) - given)
    where = dots[0] if dots else len(entries)
    entries = entries[:where] + fill + entries[where + len(dots) :]
    return Grid(shape, [along.chosen_by(entry, n, axis) for axis, (entry, n) in enumerate(zip(entries, shape))])
