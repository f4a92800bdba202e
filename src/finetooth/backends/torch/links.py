"""PyTorch: keep a base variable and its part in step.

A base holds the merged values. PyTorch has no assignment to hook, since its optimizers write parameters in place; it
counts the writes to a tensor instead. The base is written after each optimizer step, and at every read. If the part's
count has changed, autograd sees the write, and a backward that needs the values from before raises its own error. If it
has not, the write makes no difference, or somebody has written the part past autograd (`parameter.data`, some fused
kernels), which plain PyTorch does not notice either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...keras_internals import private as keras_private
from ...keras_internals import scopes
from ..contract import LinkedPart
from .writes import write_in_place

if TYPE_CHECKING:
    from ..tensor_region import TensorRegion


class _Alias(torch.autograd.Function):
    """A read of the base, whose gradient goes to the part; differentiable again."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, compact: torch.Tensor, region: TensorRegion) -> torch.Tensor:
        ctx.tensor_region, ctx.dtype = region, compact.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        return None, ctx.tensor_region.gather_gradient(upstream).to(ctx.dtype), None


class Link:
    """A base and its part in step: see `contract.Link`."""

    base_is_current = True
    differentiable_reads = False  # rules raise where second derivatives are asked for

    def __init__(self, part: LinkedPart):
        self._part = part
        self._written: tuple[Any, ...] | None = None  # the state of both when they were last in step

    def holds_merged(self) -> bool:
        part = self._part
        if torch.compiler.is_compiling() or any(map(scopes.has_scoped_value, (part.base, part.variable))):
            return False
        now = self._state()
        if self._written is not None and now[2:] != self._written[2:]:
            self._write_part()
        elif now != self._written:
            self.write_base()
        else:
            base, compact = (tensor.data for tensor in self._natives())
            write_in_place(base, part.tensor_region, compact.to(base.dtype))
        return True

    def alias(self, value: torch.Tensor) -> torch.Tensor:
        compact = keras_private.raw_value(self._part.variable)
        if value.is_meta or not torch.is_grad_enabled() or not compact.requires_grad:
            return value
        return _Alias.apply(value.detach(), compact, self._part.tensor_region)

    def write_base(self) -> None:
        base, compact = self._natives()
        with torch.no_grad():
            write_in_place(base, self._part.tensor_region, compact.to(base.dtype))
        self._written = self._state()

    def sync(self) -> None:
        self.holds_merged()

    def base_assigned(self, value: Any) -> None:
        self._write_part()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        self.write_base()
        hook = register_optimizer_step_post_hook(self._stepped)
        try:
            yield
        finally:
            hook.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        compact = keras_private.raw_value(self._part.variable)
        if any(compact is parameter for group in optimizer.param_groups for parameter in group["params"]):
            self.write_base()

    def _write_part(self) -> None:
        base, compact = self._natives()
        with torch.no_grad():
            compact.copy_(self._part.tensor_region.gather(base))
        self._written = self._state()

    def _natives(self) -> tuple[torch.Tensor, torch.Tensor]:
        return keras_private.raw_value(self._part.base), keras_private.raw_value(self._part.variable)

    def _state(self) -> tuple[Any, ...]:
        base, compact = self._natives()
        return compact._version, compact.data_ptr(), base._version, base.data_ptr()
