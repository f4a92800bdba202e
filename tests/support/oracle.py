"""A float64 NumPy reference: a two-layer network, its full gradient, and optimizers written for one array."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Arrays = dict[str, np.ndarray]


def gradient(weights: Arrays, x: np.ndarray, y: np.ndarray) -> Arrays:
    """The gradient of the mean squared error of `tanh(x A + a) B + b`."""
    hidden = np.tanh(x @ weights["in/kernel"] + weights["in/bias"])
    error = 2 * (hidden @ weights["out/kernel"] + weights["out/bias"] - y) / y.size
    below = error @ weights["out/kernel"].T * (1 - hidden**2)
    return {
        "in/kernel": x.T @ below,
        "in/bias": below.sum(0),
        "out/kernel": hidden.T @ error,
        "out/bias": error.sum(0),
    }


def sgd(rate: float, momentum: float = 0.0, decay: float = 0.0) -> Callable:
    def update(w, g, state, step):
        w = w - rate * decay * w
        state["m"] = momentum * state.get("m", 0.0) - rate * g
        return w + state["m"]

    return update


def adam(rate: float, decay: float = 0.0, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-7) -> Callable:
    def update(w, g, state, step):
        w = w - rate * decay * w
        state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
        state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
        scale = rate * np.sqrt(1 - b2**step) / (1 - b1**step)
        return w - scale * state["m"] / (np.sqrt(state["v"]) + eps)

    return update


def rmsprop(rate: float, rho: float = 0.9, eps: float = 1e-7) -> Callable:
    def update(w, g, state, step):
        state["v"] = rho * state.get("v", 0.0) + (1 - rho) * g**2
        return w - rate * g / np.sqrt(state["v"] + eps)

    return update


def clip_globally(gradients: Arrays, norm: float) -> Arrays:
    total = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    return {path: g * min(1.0, norm / total) for path, g in gradients.items()}


def clip_each(gradients: Arrays, norm: float) -> Arrays:
    return {path: g * min(1.0, norm / np.sqrt((g**2).sum())) for path, g in gradients.items()}


def train(weights: Arrays, masks: Arrays, batches, update: Callable, clip: Callable = lambda g: g) -> Arrays:
    """Run an optimizer on the masked elements alone: the gradient is full, what the optimizer sees is not."""
    weights = {path: np.array(w, np.float64) for path, w in weights.items()}
    states: dict[str, dict] = {path: {} for path in masks}
    for step, (x, y) in enumerate(batches, 1):
        full = gradient(weights, x.astype(np.float64), y.astype(np.float64))
        seen = clip({path: full[path][mask] for path, mask in masks.items()})
        for path, mask in masks.items():
            weights[path][mask] = update(weights[path][mask], seen[path], states[path], step)
    return weights
