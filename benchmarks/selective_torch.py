"""Training on a share of each batch by a step of one's own, in PyTorch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch
from torch.nn.functional import cross_entropy


def indexed(share: float) -> type[keras.Model]:
    """Forward and backward on everything; the loss is the mean over the hardest."""

    class Indexed(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            losses = cross_entropy(self(x, training=True), y.long(), reduction="none")
            loss = losses[torch.topk(losses, int(share * len(losses))).indices].mean()
            return _step(self, loss)

    return Indexed


def sampled(share: float) -> type[keras.Model]:
    """Composer's rule: sort by loss, and sample with chances that grow with the rank, by NumPy."""

    class Sampled(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with torch.no_grad():
                losses = cross_entropy(self(x, training=True), y.long(), reduction="none")
            kept = torch.argsort(losses)[ranks(len(losses), share)]
            return _step(self, cross_entropy(self(x[kept], training=True), y[kept].long()))

    return Sampled


def ranks(count: int, share: float) -> np.ndarray:
    chances = ((np.arange(count) + 0.5) / count) ** (1 / share - 1)
    return np.random.choice(count, int(share * count), replace=False, p=chances / chances.sum())


def _step(model: keras.Model, loss: torch.Tensor) -> dict[str, Any]:
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        model.optimizer.apply([v.value.grad for v in model.trainable_weights], model.trainable_weights)
    return {"loss": loss.detach()}
