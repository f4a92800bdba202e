"""What PyTorch's users have: transformers and PEFT in a plain loop, with PyTorch's fused optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers

from finetooth.regions.region import Whole

from .llama import Shape
from .on_torch import DEVICE, bits, fused
from .run import Moved, Run, Task, count_moved, elements


def looped(
    task: Task, model: torch.nn.Module, optimizer: type, outputs: Callable[[Any], Any] = lambda outputs: outputs
) -> Run:
    """Steps of a plain loop over what requires a gradient."""
    named = dict(model.named_parameters())
    trained = {name: Whole(p.shape) for name, p in named.items() if p.requires_grad}
    before = {name: bits(p) for name, p in named.items()}
    stepping = fused(optimizer, [named[name] for name in trained])
    x, y = task.data

    def step() -> torch.Tensor:
        stepping.zero_grad()
        loss = task.loss(outputs(model(x)), y)
        loss.backward()
        stepping.step()
        return loss.detach()

    def moved() -> Moved:
        return count_moved(before, ((name, bits(p)) for name, p in named.items()), trained)

    return Run(step, elements(trained.values()), len(trained) < len(named), moved)


class Table(torch.nn.Module):
    """A look-up and a small head."""

    def __init__(self, vocabulary: int, width: int, outputs: int):
        super().__init__()
        self.table = torch.nn.Embedding(vocabulary, width)
        self.head = torch.nn.Linear(width, outputs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


def table(task: Task, vocabulary: int, width: int, outputs: int, rows: list[int]) -> Run:
    """A frozen table, or one of which PEFT's TrainableTokens trains rows; the head trains in both."""
    torch.manual_seed(0)
    with DEVICE:
        model: Any = Table(vocabulary, width, outputs).to(torch.bfloat16)
    model.table.requires_grad_(False)
    if rows:
        config = peft.TrainableTokensConfig(target_modules=["table"], token_indices=rows)
        model = peft.get_peft_model(model, config)
        model.base_model.model.head.requires_grad_(True)
    return looped(task, model, torch.optim.Adam)


def full_llama(task: Task, shape: Shape) -> Run:
    return looped(task, _llama(shape), torch.optim.AdamW, lambda outputs: outputs.logits)


def lora_llama(task: Task, shape: Shape, wide: bool) -> Run:
    """LoRA on all linear layers; PEFT's default is a `wide` adapter, float32 for a bfloat16 model, which is slower."""
    config = peft.LoraConfig(r=shape.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(_llama(shape), config, autocast_adapter_dtype=wide)
    return looped(task, model, torch.optim.AdamW, lambda outputs: outputs.logits)


def _llama(shape: Shape) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.tokens,
        use_cache=False,
        tie_word_embeddings=False,
    )
    with DEVICE:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.train()
