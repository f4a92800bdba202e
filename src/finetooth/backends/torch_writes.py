"""PyTorch: write elements of a tensor in place."""

from __future__ import annotations

from typing import Any

import torch


def on(value: torch.Tensor, coordinates: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The coordinates on the value's device, which need not be the one that Keras uses."""
    return tuple(coordinate.to(value.device) for coordinate in coordinates)


def write_in_place(target: torch.Tensor, place: Any, value: torch.Tensor) -> None:
    """Write the elements at a place. Autograd notices, unless it is told not to."""
    if place.points is not None:
        target.index_put_(on(target, place.points), value)
        return
    indexed = [(axis, where) for axis, where in place.axes if not isinstance(where, range)]
    for axis, where in place.axes:
        if isinstance(where, range):
            target = target.narrow(axis, where.start, len(where))
    if not indexed:
        target.copy_(value)
    elif len(indexed) == 1:
        ((axis, where),) = indexed
        target.index_copy_(axis, where.to(target.device), value)
    else:
        wheres = [torch.arange(length, device=target.device) for length in target.shape]
        for axis, where in indexed:
            wheres[axis] = where.to(target.device)
        target.index_put_(torch.meshgrid(*wheres, indexing="ij"), value)
