"""Leave a layer out of the forward and the backward pass while a condition, known at run time, says so."""

import keras
import numpy as np
from proof import numbers, unchanged

import finetooth as ft

rng = np.random.default_rng(0)
x, y = rng.normal(size=(64, 8)).astype("float32"), rng.normal(size=(64, 3)).astype("float32")
traced = []


class Block(keras.layers.Layer):
    """A residual block that says when it is traced."""

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        traced.append(self.name)
        return x + keras.ops.tanh(x @ self.kernel)


run = keras.Variable(True, dtype="bool", trainable=False)  # or an input, a schedule, a chance
block = Block(name="block")
model = keras.Sequential([keras.Input((8,)), ft.Gate(block, when=run, closed="skip"), keras.layers.Dense(3)])
model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "mse")
model.fit(x, y, verbose=0)


def weights():
    """The block's weights and the other layer's, side by side."""
    return np.concatenate([numbers(block.kernel).ravel(), *(numbers(v).ravel() for v in model.layers[-1].weights)])


before, count = weights(), len(traced)
run.assign(False)
model.fit(x, y, epochs=5, verbose=0)
unchanged(before, weights(), np.arange(before.size) >= 64)  # no gradient, no decay, no momentum

# Compiled once for both, and not computed: where only what runs is traced, PyTorch, it is not even called.
print(f"traced again while skipped: {len(traced) - count} times")
block.kernel.assign(np.full((8, 8), np.nan))
finite = np.isfinite(model.predict(x, verbose=0)).all()
if len(traced) > count + (keras.backend.backend() != "torch") or not finite:
    raise SystemExit("Not what was promised.")
