"""Train only the elements of a variable that a mask marks, with an optimizer that decays weights."""

import keras
import numpy as np
from proof import equal, numbers, unchanged

import finetooth as ft

rng = np.random.default_rng(0)
start, target = rng.normal(size=(2, 6, 4)).astype("float32")
mask = rng.random((6, 4)) < 0.3
w = keras.Variable(start)

optimizer = ft.SelectiveOptimizer(keras.optimizers.AdamW(0.05, weight_decay=0.1), [(w, mask)])
for _ in range(20):
    loss, gradient = ft.gradients(lambda: keras.ops.sum((w - target) ** 2), w)
    optimizer.apply([gradient], [w])

unchanged(start, w, mask)

alone, plain = keras.Variable(start[mask]), keras.optimizers.AdamW(0.05, weight_decay=0.1)
for _ in range(20):
    plain.apply([2 * (alone - target[mask])], [alone])
equal("inside, AdamW on these elements alone", numbers(w)[mask], numbers(alone))
