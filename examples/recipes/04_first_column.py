"""Train the first column of a matrix."""

import keras
import numpy as np
from proof import numbers, unchanged

import finetooth as ft

rng = np.random.default_rng(0)
start, x = rng.normal(size=(5, 3)).astype("float32"), rng.normal(size=(16, 5)).astype("float32")
w = keras.Variable(start)
column = ft.Part(w, np.s_[:, 0])

optimizer = keras.optimizers.Adam(0.05)
losses = []
for _ in range(30):
    loss, gradient = ft.gradients(lambda: keras.ops.mean((keras.ops.matmul(x, column.merged()) - 1) ** 2), column)
    optimizer.apply([gradient], [column.variable])
    losses.append(float(loss))
column.assign(column.variable)

unchanged(start, w, np.arange(3) == np.zeros((5, 1)))
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, optimizer state {[tuple(v.shape) for v in optimizer.variables[2:]]}")
if not losses[-1] < losses[0] or (numbers(w)[:, 0] == start[:, 0]).any():
    raise SystemExit("Not what was promised.")
