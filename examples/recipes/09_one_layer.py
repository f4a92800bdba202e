"""Train one layer of a model, named by the object or by a path. A name that matches nothing is an error."""

import keras
import numpy as np
from proof import numbers

import finetooth as ft

rng = np.random.default_rng(0)
x, y = rng.normal(size=(64, 8)).astype("float32"), rng.integers(0, 3, 64)
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16, "relu", name="hidden"), keras.layers.Dense(3, name="output")]
)
hidden = [numbers(v) for v in model.get_layer("hidden").weights]

try:
    ft.select(model, "dense_1/*")
except ft.SelectionError as error:
    print(error)

if ft.select(model, model.get_layer("output")) != ft.select(model, "output/*"):
    raise SystemExit("Not what was promised.")
with ft.tune(model, "output/*") as tuning:
    model.compile("adamw", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(x, y, epochs=5, verbose=0).history["loss"]
print(f"loss {history[0]:.3f} -> {history[-1]:.3f}. {tuning.verify()}")
same = all((numbers(v) == old).all() for v, old in zip(model.get_layer("hidden").weights, hidden))
if not same or not history[-1] < history[0]:
    raise SystemExit("Not what was promised.")
