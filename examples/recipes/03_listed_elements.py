"""Update listed elements only, with real Adam, whose state is as large as the list."""

import keras
import numpy as np
from proof import equal, numbers, unchanged

import finetooth as ft

start = np.arange(8, dtype="float32")
listed = [6, 0, 3]
w = keras.Variable(start)

optimizer = ft.SelectiveOptimizer(keras.optimizers.Adam(0.1), [(w, listed)])
for _ in range(10):
    loss, gradient = ft.gradients(lambda: keras.ops.sum(keras.ops.sin(w.value)), w)
    optimizer.apply([gradient], [w])

unchanged(start, w, np.isin(np.arange(8), listed))
state = [v for v in optimizer.inner_optimizer.variables if len(v.shape)]
print("Adam's state:", [tuple(v.shape) for v in state])

x, m, v = start[listed].astype("float64"), 0.0, 0.0
for step in range(1, 11):
    g = np.cos(x)
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    x = x - 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step) * m / (np.sqrt(v) + 1e-7)
equal("Adam in NumPy", numbers(w)[listed], x)
