"""What others offer on PyTorch: PEFT, LoRA as it is usually written, masked gradients, SparseAdam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import peft
import torch
from contenders import RATE, Data, Loop, elements, forget_peak, initial
from native_torch import adam, looped, state_of
from workloads import Make

from finetooth.regions.indexing import region_at


def contenders() -> dict[str, dict[str, Make]]:
    """Further contenders of the workloads, by their names."""
    rank_of_slice = 32  # SHiRA trains r * (inputs + outputs) elements: 65,536 of each kernel, as many as the slice has
    return {
        "slice": {
            "masked gradient, own loop": lambda data: masked_stack(data, low=256, high=512),
            "factored LoRA, r=8": factored_lora,
            "PEFT LoRA, r=8": lambda data: adapted(stack(), data, peft.LoraConfig(r=8, target_modules=LAYERS)),
            "PEFT SHiRA, as many": lambda data: adapted(stack(), data, shira(rank_of_slice)),
        },
        "rows": {
            "PEFT TrainableTokens": lambda data: adapted(Table(), data.share(0.25), trainable_tokens()),
            "SparseAdam, rows that occur": lambda data: sparse_adam(data.share(0.25)),
        },
        "points": {"PEFT SHiRA, 1%": lambda data: adapted(stack(), data, shira(5))},
    }


LAYERS = [f"d{i}" for i in range(4)]


def linear(name: str, width: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(width, width)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(initial(f"{name}/kernel", (width, width)).T))
        layer.bias.zero_()
    return layer


def stack(width: int = 1024) -> torch.nn.Module:
    model = torch.nn.Sequential()
    for name in LAYERS:
        model.add_module(name, linear(name, width))
        model.add_module(f"{name}_relu", torch.nn.ReLU())
    forget_peak()
    return model


class Table(torch.nn.Module):
    def __init__(self, sparse: bool = False, count: int = 32_000, width: int = 768):
        super().__init__()
        values = torch.from_numpy(initial("table/embeddings", (count, width)))
        self.table = torch.nn.Embedding.from_pretrained(values, freeze=False, sparse=sparse)
        self.stack = stack(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.stack(self.table(tokens).mean(1))


def named_weights(model: torch.nn.Module) -> Callable[[], dict[str, np.ndarray]]:
    """The weights the model began with, by the paths and in the layout that Keras gives them."""
    layers = {name.rsplit(".", 1)[-1]: module for name, module in model.named_modules()}

    def weights() -> dict[str, np.ndarray]:
        named = {f"{name}/kernel": layers[name].weight.detach().numpy().T for name in LAYERS}
        named |= {f"{name}/bias": layers[name].bias.detach().numpy() for name in LAYERS}
        if "table" in layers:
            named["table/embeddings"] = layers["table"].weight.detach().numpy()
        return named

    return weights


def trained(model: torch.nn.Module, data: Data, weights: Any, may_move: Any, optimizer: Any = adam) -> Loop:
    parameters = [p for p in model.parameters() if p.requires_grad]
    stepping = optimizer(parameters)
    loop = looped(model, stepping, data)
    return loop.holding(elements(parameters), state_of(stepping), weights, may_move)


def adapted(model: torch.nn.Module, data: Data, config: Any) -> Loop:
    """A PEFT method, which promises to leave the whole base model alone."""
    weights = named_weights(model)
    return trained(peft.get_peft_model(model, config), data, weights, {})


def shira(rank: int) -> Any:
    return peft.ShiraConfig(r=rank, target_modules=LAYERS, random_seed=0)


def trainable_tokens() -> Any:
    return peft.TrainableTokensConfig(target_modules=["table"], token_indices=list(range(10)))


class FactoredLora(torch.nn.Module):
    def __init__(self, base: torch.nn.Linear, rank: int = 8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(base.in_features, rank) / rank)
        self.up = torch.nn.Parameter(torch.zeros(rank, base.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.base(x), x @ self.down, self.up)


def factored_lora(data: Data) -> Loop:
    model = stack()
    weights = named_weights(model)
    for name in LAYERS:
        setattr(model, name, FactoredLora(getattr(model, name)))
    return trained(model, data, weights, {})


def masked_stack(data: Data, low: int, high: int) -> Loop:
    """Frozen biases, and a hook on every kernel that masks its gradient."""
    model = stack()
    square = region_at((1024, 1024), (slice(low, high), slice(low, high)))
    mask = torch.from_numpy(square.mask().astype("float32"))  # it is its own transpose
    for name in LAYERS:
        layer = getattr(model, name)
        layer.bias.requires_grad_(False)
        layer.weight.register_hook(lambda gradient: gradient * mask)
    return trained(model, data, named_weights(model), {f"{name}/kernel": square for name in LAYERS})


def sparse_adam(data: Data) -> Loop:
    """Adam on the rows that occur in a batch, and on no others: there is no choosing among them."""
    model = Table(sparse=True)
    model.stack.requires_grad_(False)
    may_move = {"table/embeddings": region_at((32_000, 768), slice(10))}
    return trained(model, data, named_weights(model), may_move, lambda p: torch.optim.SparseAdam(p, RATE))
