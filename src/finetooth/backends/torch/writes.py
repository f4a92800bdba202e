"""PyTorch: write elements of a tensor in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .tensors import on

if TYPE_CHECKING:
    from ..tensor_region import TensorRegion


def write_in_place(target: torch.Tensor, region: TensorRegion, value: torch.Tensor) -> None:
    """Write the elements of a region. Autograd notices, unless it is told not to."""
    if region.points is not None:
        target.index_put_(on(target, region.points), value)
        return
    indexed = [(axis, where) for axis, where in region.axes if not isinstance(where, range)]
    for axis, where in region.axes:
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
