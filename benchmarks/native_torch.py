"""Training steps in plain PyTorch: finetooth without `fit`, and the hand-written floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import torch
from contenders import RATE, Data, Loop, elements, initial

from finetooth.keras_internals.weights import to_numpy
from finetooth.regions.indexing import region_at


def looped(forward: Callable[[Any], Any], optimizer: Any, data: Data, after: Callable[[], Any] | None = None) -> Loop:
    """The usual loop with squared error; `after` runs once the optimizer has stepped."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.mean(torch.square(forward(x) - y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if after is not None:
            after()
        return loss

    batches = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data.batches]
    return Loop(step, batches, lambda loss: None)  # PyTorch on a CPU has finished when it returns


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, RATE, eps=1e-7, fused=True)


def state_of(optimizer: torch.optim.Optimizer) -> Callable[[], int]:
    return lambda: elements(s for slots in optimizer.state.values() for s in slots.values() if torch.is_tensor(s))


def own_loop(model: keras.Model, weights: Mapping[str, keras.Variable], data: Data, may_move: Any) -> Loop:
    """A Keras model's step with PyTorch's fused Adam, squared error."""
    parameters = [v.value for v in model.trainable_variables]
    optimizer = adam(parameters)
    loop = looped(lambda x: model(x, training=True), optimizer, data)
    return loop.holding(
        elements(parameters),
        state_of(optimizer),
        lambda: {path: to_numpy(v) for path, v in weights.items()},
        may_move,
    )


def slice_floor(depth: int, width: int, low: int, high: int, data: Data) -> Loop:
    """Dense layers of which the square [low:high, low:high] trains, as fast as we can write it in PyTorch."""
    kernels = [torch.from_numpy(initial(f"d{i}/kernel", (width, width))) for i in range(depth)]
    biases = [torch.zeros(width) for _ in kernels]
    squares = [kernel[low:high, low:high] for kernel in kernels]
    parts = [torch.nn.Parameter(square.clone()) for square in squares]

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor, part: torch.Tensor) -> Any:
            ctx.save_for_backward(x[:, low:high].contiguous(), kernel)
            return torch.addmm(bias, x, kernel)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            kept, kernel = ctx.saved_tensors
            dx = dy @ kernel.t() if ctx.needs_input_grad[0] else None
            return dx, None, None, kept.t() @ dy[:, low:high]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for kernel, bias, part in zip(kernels, biases, parts):
            x = Product.apply(x, kernel, bias, part).relu_()
        return x

    @torch.no_grad()
    def write() -> None:
        for square, part in zip(squares, parts):
            square.copy_(part)

    def weights() -> dict[str, np.ndarray]:
        named = {f"d{i}/kernel": kernel.numpy() for i, kernel in enumerate(kernels)}
        return named | {f"d{i}/bias": bias.numpy() for i, bias in enumerate(biases)}

    optimizer = adam(parts)
    square = region_at((width, width), (slice(low, high), slice(low, high)))
    may_move = {f"d{i}/kernel": square for i in range(depth)}
    return looped(forward, optimizer, data, write).holding(elements(parts), state_of(optimizer), weights, may_move)
