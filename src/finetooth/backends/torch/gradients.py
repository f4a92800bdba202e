"""PyTorch: operations with gradients of our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from ...errors import TuningError
from ..contract import LinkedPart, Operation, RowSlots
from ..defaults import native_of


class _Attach(torch.autograd.Function):
    """The outputs as they are; on the way back the part gets its gradient from the inputs that were kept."""

    @staticmethod
    def forward(
        ctx: Any, operation: Operation, outputs: torch.Tensor, kept: torch.Tensor, part: torch.Tensor
    ) -> torch.Tensor:
        ctx.operation = operation
        ctx.save_for_backward(kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise TuningError(
                "A part of a kernel is read in a way that has no second derivatives on PyTorch. "
                "Use tune(..., layer_rules=False) for gradient penalties and the like."
            )
        (kept,) = ctx.saved_tensors
        return None, dy, None, ctx.operation.gradient_part(kept, dy)


def product_with_part_gradient(
    operation: Operation, x: torch.Tensor, kernel: torch.Tensor, part: torch.Tensor
) -> torch.Tensor:
    if (
        torch.compiler.is_compiling()
    ):  # which fails on `_Attach` for layers of several shapes; the kernel is composed then
        return operation.forward(x, kernel)
    # The gradient for x is PyTorch's own: it keeps nothing for a kernel that takes none.
    outputs = operation.forward(x, kernel.detach())
    if not part.requires_grad or not torch.is_grad_enabled():
        return outputs
    kept = operation.keep(x.detach())
    if 2 * kept.numel() <= x.numel() and kept.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        kept = kept.clone()  # or all of x would stay
    return _Attach.apply(operation, outputs, kept, part)


class _SumByRow(torch.autograd.Function):
    """The outputs as they are; on the way back the gradients of the part's tokens are summed by row."""

    @staticmethod
    def forward(ctx: Any, rows: RowSlots, outputs: torch.Tensor, tokens: torch.Tensor, part: torch.Tensor) -> Any:
        ctx.rows = rows
        ctx.save_for_backward(tokens)
        return outputs

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        slots = ctx.rows.slots(tokens)
        count = ctx.rows.count
        # What PyTorch's own embedding does; the tokens of frozen rows are its padding, which gets no gradient.
        slots = torch.where(slots < 0, count, slots).long()
        return None, None, None, torch.ops.aten.embedding_dense_backward(dy, slots, count + 1, count, False)[:count]


def look_up(rows: RowSlots, tokens: torch.Tensor, table: torch.Tensor, part: LinkedPart) -> torch.Tensor:
    value = part.variable.value
    if part.link.holds_merged():
        outputs = keras.ops.take(table, tokens, axis=0)
        return _SumByRow.apply(rows, outputs.detach(), tokens, value) if torch.is_grad_enabled() else outputs
    slots = rows.slots(tokens)
    own = value.to(table.dtype)[slots.clamp(min=0)]
    return torch.where(slots.unsqueeze(-1) >= 0, own, keras.ops.take(table, tokens, axis=0))


def mask_gradient(gradient: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if gradient.is_sparse:
        values = mask_gradient(gradient._values(), mask)
        return torch.sparse_coo_tensor(gradient._indices(), values, gradient.shape)
    return torch.where(mask, gradient, 0)


def forward_with_gradients(function: Callable[[], tuple[torch.Tensor, Any]], sources: Sequence[Any]) -> Any:
    natives = [native_of(source) for source in sources]
    with torch.enable_grad():
        loss, more = function()

    def gradients(chosen: Sequence[int]) -> Any:
        if not loss.requires_grad:
            return [None] * len(chosen)
        wanted = [natives[i] for i in chosen]
        return torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)

    return loss.detach(), more, gradients
