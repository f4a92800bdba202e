"""PyTorch: training steps, memory, and the operations that contenders written by hand need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch
from torch.nn import functional

from . import optimizers

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def device_name() -> str:
    return torch.cuda.get_device_name() if CUDA else "CPU"


def wait(result: Any) -> None:
    if CUDA:
        torch.cuda.synchronize()


def warm_up() -> None:
    """Have PyTorch allocate what its matrix products keep for good, so that it is not counted as the first model's."""
    matrix = torch.ones((64, 64), dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    torch.addmm(matrix[0], matrix @ matrix, matrix).sum().backward()


def free() -> None:
    if CUDA:
        torch.cuda.empty_cache()


def allocated() -> int:
    return torch.cuda.memory_allocated() if CUDA else 0


def peak_of(run: Callable[[], None]) -> int | None:
    """The most bytes that tensors held at any time while it ran."""
    if not CUDA:
        return None
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a tensor's bits in main memory, as integers."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(integers).to("cpu", copy=True).numpy()


class Steps:
    """Training steps of a Keras model, with an optimizer of Keras, or a fused one of PyTorch."""

    peak = None

    def __init__(self, model: keras.Model, data: Any, loss: Callable[..., Any], optimizer: type, masks: Any):
        variables = model.trainable_variables
        parameters = [variable.value for variable in variables]
        update = _updating(optimizer, variables, parameters)
        x, y = data

        def step() -> torch.Tensor:
            for parameter in parameters:
                parameter.grad = None
            value = loss(model(x, training=True), y)
            value.backward()
            with torch.no_grad():
                gradients = [parameter.grad for parameter in parameters]
                update(gradients if masks is None else [g * mask for g, mask in zip(gradients, masks)])
            return value.detach()

        self.step = step

    def settle(self) -> None:
        """Variables are written at every step."""


def _updating(
    optimizer: type, variables: list[keras.Variable], parameters: list[torch.Tensor]
) -> Callable[[Any], None]:
    if issubclass(optimizer, torch.optim.Optimizer):
        stepping = fused(optimizer, parameters)
        return lambda gradients: stepping.step()
    keras_optimizer = optimizers.made(optimizer)
    keras_optimizer.build(variables)
    return lambda gradients: keras_optimizer.apply(gradients, variables)


def fused(optimizer: type, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return optimizer(parameters, optimizers.RATE, optimizers.BETAS, fused=True)


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy in float32, as transformers computes it."""
    return functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


def plus_product(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """y + a @ b, in one kernel."""
    return torch.addmm(y.reshape(-1, b.shape[1]), a, b).reshape(y.shape)


def live_product(points: torch.Tensor, x: torch.Tensor, kernel: keras.Variable, part: torch.Tensor) -> torch.Tensor:
    """x @ kernel with the part written into the kernel; the part's gradient is taken from the dense one."""
    kernel.value.data.view(-1).index_copy_(0, points, part.detach().to(kernel.value.dtype))
    return _LiveProduct.apply(points, x, kernel.value, part)


class _LiveProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, points: torch.Tensor, x: torch.Tensor, kernel: torch.Tensor, part: torch.Tensor) -> Any:
        ctx.save_for_backward(points, x, kernel)
        return x @ kernel

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        points, x, kernel = ctx.saved_tensors
        dx = dy @ kernel.t() if ctx.needs_input_grad[1] else None
        return None, dx, None, (x.t() @ dy).view(-1)[points].float()
