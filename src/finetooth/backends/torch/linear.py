"""PyTorch: the gradient of a linear function for its argument, without computing the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_KERNEL_GRADIENTS = {
    torch.conv1d: torch.nn.grad.conv1d_weight,
    torch.conv2d: torch.nn.grad.conv2d_weight,
    torch.conv3d: torch.nn.grad.conv3d_weight,
}
_TRANSPOSED = {
    torch.conv_transpose1d: torch.conv1d,
    torch.conv_transpose2d: torch.conv2d,
    torch.conv_transpose3d: torch.conv3d,
}


class _KernelGradient(torch.autograd.Function):
    """A convolution for the sake of its kernel's gradient: of the outputs only the shape is right."""

    @staticmethod
    def forward(ctx: Any, convolve: Any, x: torch.Tensor, kernel: torch.Tensor, options: dict) -> torch.Tensor:
        ctx.convolve, ctx.shape, ctx.options = convolve, kernel.shape, options
        ctx.save_for_backward(x)
        return x.new_empty(convolve(x.to("meta"), kernel.to("meta"), **options).shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if ctx.convolve in _TRANSPOSED:  # a convolution from its outputs to its inputs
            x, dy = dy, x
            ctx.options.pop("output_padding")
        gradient = _KERNEL_GRADIENTS[_TRANSPOSED.get(ctx.convolve, ctx.convolve)]
        return None, None, gradient(x, ctx.shape, dy, **ctx.options), None


class _Backwards(torch.overrides.TorchFunctionMode):
    """While open, convolutions of constant inputs compute no outputs, and read the inputs as they lie in memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.contiguous:
            return args[0]  # Keras copies to the layout that is best for outputs
        convolves = function in _KERNEL_GRADIENTS or function in _TRANSPOSED
        if convolves and not args[0].requires_grad:
            return _KernelGradient.apply(function, *args, kwargs)
        return function(*args, **(kwargs or {}))


def linear_vjp(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad(), _Backwards():
        at = at.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(function(at), at, dy)
    return gradient
