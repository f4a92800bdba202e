"""Different regions of a model's variables, checked one by one, trained with fit."""

import keras
import numpy as np
from proof import numbers, unchanged

import finetooth as ft

rng = np.random.default_rng(0)
x, y = rng.normal(size=(64, 8)).astype("float32"), rng.normal(size=(64, 3)).astype("float32")
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16, "relu", name="hidden"), keras.layers.Dense(3, name="output")]
)
half = rng.random((16, 3)) < 0.5
part = ft.select(model, "hidden/kernel[:, :4]", "hidden/bias[:4]", ("output/kernel", half))
before = {path: numbers(model.get_layer(path.split("/")[0]).kernel) for path in ("hidden/kernel", "output/kernel")}

with ft.tune(model, part) as tuning:
    print(tuning)
    model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "mse")
    model.fit(x, y, epochs=5, verbose=0)
print(tuning.verify())
unchanged(before["hidden/kernel"], model.get_layer("hidden").kernel, np.arange(16) < np.full((8, 1), 4))
unchanged(before["output/kernel"], model.get_layer("output").kernel, half)
try:
    ft.select(model, ("output/kernel", half.T))
except ft.SelectionError as error:
    print(error)
else:
    raise SystemExit("Not what was promised.")
