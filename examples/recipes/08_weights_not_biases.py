"""Train W and not b: in a loop of one's own, and with fit."""

import keras
import numpy as np
from proof import numbers, unchanged

import finetooth as ft

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 3)).astype("float32")
y = x @ np.array([[1.0], [-2.0], [0.5]], "float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="linear")])
layer = model.get_layer("linear")

before = [numbers(v) for v in (layer.kernel, layer.bias)]
optimizer = keras.optimizers.Adam(0.1)
for _ in range(20):
    loss, gradient = ft.gradients(lambda: keras.ops.mean(keras.losses.mean_squared_error(y, model(x))), layer.kernel)
    optimizer.apply([gradient], [layer.kernel])
print(f"own loop: loss {float(loss):.3f}")

with ft.tune(model, layer.kernel) as tuning:
    model.compile(keras.optimizers.AdamW(0.1), "mse")
    history = model.fit(x, y, epochs=10, verbose=0).history["loss"]
print(f"fit: loss {history[0]:.3f} -> {history[-1]:.3f}")
print(tuning.verify())
unchanged(before[0], layer.kernel, np.ones((3, 1), bool))
if (numbers(layer.bias) != before[1]).any() or not history[-1] < history[0]:
    raise SystemExit("Not what was promised.")
