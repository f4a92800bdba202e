"""PyTorch: elements of tensors and products of matrices."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import torch

from ..contract import Axes, AxisIndex, ProductCosts


def index(indices: np.ndarray, length: int) -> torch.Tensor:
    return keras.ops.convert_to_tensor(indices, "int64")


def coordinates(arrays: tuple[np.ndarray, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(keras.ops.convert_to_tensor(array, "int64") for array in arrays)


def take(value: torch.Tensor, axis: int, where: AxisIndex) -> torch.Tensor:
    if isinstance(where, range):
        return value.narrow(axis, where.start, len(where))
    return value.index_select(axis, where.to(value.device))


@torch.compiler.disable  # PyTorch compiles it for one layer, and fails when another has ranges of its own
def put(value: torch.Tensor, axes: Axes, part: torch.Tensor) -> torch.Tensor:
    (axis, where), *rest = axes
    part = put(take(value, axis, where), rest, part) if rest else part.to(value.device)
    if isinstance(where, range):
        return torch.slice_scatter(value, part, axis, where.start, where.stop)
    return value if value.is_meta else value.index_copy(axis, where.to(value.device), part)


def take_points(value: torch.Tensor, coordinates: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return value[on(value, coordinates)]


def put_points(value: torch.Tensor, coordinates: tuple[torch.Tensor, ...], part: torch.Tensor) -> torch.Tensor:
    return value if value.is_meta else value.index_put(on(value, coordinates), part.to(value.device))


def on(value: torch.Tensor, coordinates: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The coordinates on the value's device, which need not be the one that Keras uses."""
    return tuple(coordinate.to(value.device) for coordinate in coordinates)


# Eager PyTorch runs this Python at every step, where `keras.ops` takes several times as long as the call it makes.
def matmul(a: torch.Tensor, b: torch.Tensor, transpose_a: bool = False, transpose_b: bool = False) -> torch.Tensor:
    return (a.t() if transpose_a else a) @ (b.t() if transpose_b else b)


def einsum(equation: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.einsum(equation, a, b)


def as_matrix(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1, value.shape[-1])


def product_costs() -> ProductCosts:
    return ProductCosts(10, 1, 170) if _on_cpu() else ProductCosts(4700, 20, 1500)


def alignment() -> int:
    return 1 if _on_cpu() else 8


def _on_cpu() -> bool:
    return keras.ops.zeros(()).device.type == "cpu"


def samples(shape: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> torch.Tensor:
    starts = np.searchsorted(rows, np.arange(shape[0] + 1))
    where = (keras.ops.convert_to_tensor(indices, "int32") for indices in (starts, columns))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse")  # PyTorch, about itself
        return torch.sparse_csr_tensor(*where, keras.ops.zeros(len(rows), "float32"), shape)


def sampled_product(samples: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.sparse.sampled_addmm(samples.to(wide), a.to(wide).t(), b.to(wide), beta=0).values().to(b.dtype)


def is_dense(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or (value.layout == torch.strided and not value.is_nested)
