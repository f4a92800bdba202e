"""PyTorch: read and write variables and their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import torch

from ...errors import PartError
from ...keras_internals import scopes
from ..defaults import native_of
from .writes import write_in_place

if TYPE_CHECKING:
    from ..tensor_region import TensorRegion


def is_variable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf


def read(variable: Any, region: TensorRegion) -> torch.Tensor:
    value = native_of(variable).detach()
    gathered = region.gather(value)
    shares = gathered.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    return gathered.clone() if shares else gathered


def write(variable: Any, region: TensorRegion, compact: torch.Tensor) -> Any:
    target = native_of(variable)
    if isinstance(variable, keras.Variable) and scopes.in_stateless_scope():
        variable.assign(region.scatter(target, compact))
        return variable
    with torch.no_grad():
        write_in_place(target, region, compact.to(target))
    return variable


def trainable_like(variable: Any, value: torch.Tensor, name: str) -> Any:
    if isinstance(variable, keras.Variable):
        return keras.Variable(value, dtype=keras.backend.standardize_dtype(value.dtype), name=name)
    return torch.nn.Parameter(value.detach().clone().to(variable.device))


def sparse_rows(gradient: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not gradient.is_sparse:
        return None
    if gradient.sparse_dim() != 1:
        raise PartError(f"A sparse gradient of rows has sparse_dim() 1; received one with {gradient.sparse_dim()}.")
    return gradient._indices()[0], gradient._values()  # rows that repeat are fine here, and `coalesce` sorts


def distinct_rows(indices: torch.Tensor, values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, slots = torch.unique(indices, return_inverse=True)
    return rows, values.new_zeros(len(rows), *values.shape[1:]).index_add_(0, slots, values)


def read_rows(variable: Any, rows: torch.Tensor) -> torch.Tensor:
    return native_of(variable).detach().index_select(0, rows)


def write_rows(variable: Any, rows: torch.Tensor, values: torch.Tensor) -> None:
    if scopes.in_stateless_scope():
        variable.assign(variable.value.detach().index_copy(0, rows, values))
        return
    with torch.no_grad():
        native_of(variable).index_copy_(0, rows, values)
