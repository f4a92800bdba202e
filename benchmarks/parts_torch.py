"""Updates of some elements, and lazy steps, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch

import finetooth as ft

Update = tuple[Callable[[], Any], Callable[[], Any]]


def updates(shape: tuple[int, int], index: Any, only: str | None = None) -> dict[str, Update]:
    x = torch.randn(8, shape[0])
    new = torch.randn(ft.Part(torch.zeros(shape), index).shape)
    native = torch.as_tensor(index) if isinstance(index, np.ndarray) else index

    def finetooth(tensor: torch.Tensor) -> Callable[[], Any]:
        part = ft.Part(tensor, index)
        return lambda: part.assign(new)

    def indexed(tensor: torch.Tensor) -> Callable[[], Any]:
        def update() -> None:
            tensor[native] = new

        return update

    def copied(tensor: torch.Tensor) -> Callable[[], Any]:
        flat = torch.as_tensor(ft.Part(tensor, index).region.flat())
        values = new.reshape(-1)

        def update() -> None:
            tensor.copy_(tensor.reshape(-1).scatter(0, flat, values).view(shape))

        return update

    makes = {"finetooth": finetooth, "tensor[index] = new": indexed, "copy_(scatter)": copied}
    made = {}
    for name, make in makes.items():
        if only in (None, name):
            tensor = torch.zeros(shape)
            made[name] = make(tensor), lambda tensor=tensor: x @ tensor
    return made


def table_steps(rows: int, width: int, lookups: int, only: Sequence[str] = ()) -> dict[str, Callable[[], Any]]:
    tokens = torch.as_tensor(np.random.default_rng(0).integers(0, rows, lookups))
    targets = torch.randn(lookups, width)

    def with_optimizer(update: Callable[[Any], None], table: torch.Tensor, sparse: bool) -> Callable[[], Any]:
        def step() -> None:
            looked = torch.nn.functional.embedding(tokens, table, sparse=sparse)
            ((looked - targets) ** 2).mean().backward()
            update(table.grad)
            table.grad = None

        return step

    def by_keras(optimizer: keras.optimizers.Optimizer, sparse: bool) -> Callable[[], Any]:
        variable = keras.Variable(np.zeros((rows, width), "float32"))
        optimizer.build([variable])
        return with_optimizer(lambda g: optimizer.apply([g], [variable]), variable.value, sparse)

    def by_torch() -> Callable[[], Any]:
        table = torch.nn.Parameter(torch.zeros(rows, width))
        optimizer = torch.optim.SparseAdam([table])
        return with_optimizer(lambda _: optimizer.step(), table, True)

    def by_hand() -> Callable[[], Any]:
        table = torch.nn.Parameter(torch.zeros(rows, width))
        m, v, count = torch.zeros(rows, width), torch.zeros(rows, width), [0]

        @torch.no_grad()
        def update(gradient: torch.Tensor) -> None:
            used, slots = torch.unique(gradient._indices()[0], return_inverse=True)
            g = torch.zeros(len(used), width).index_add_(0, slots, gradient._values())
            count[0] += 1
            new_m = m[used].lerp_(g, 0.1)
            new_v = v[used].mul_(0.999).addcmul_(g, g, value=0.001)
            rate = 1e-3 * (1 - 0.999 ** count[0]) ** 0.5 / (1 - 0.9 ** count[0])
            m.index_copy_(0, used, new_m)
            v.index_copy_(0, used, new_v)
            table.index_add_(0, used, new_m.div_(new_v.sqrt_().add_(1e-7)), alpha=-rate)

        return with_optimizer(update, table, True)

    makes = {
        "finetooth": lambda: by_keras(ft.LazyOptimizer(keras.optimizers.Adam()), True),
        "Keras Adam": lambda: by_keras(keras.optimizers.Adam(), False),
        "torch SparseAdam": by_torch,
        "lazy Adam by hand": by_hand,
    }
    return {name: make() for name, make in makes.items() if name in (only or makes)}
