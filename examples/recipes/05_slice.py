"""The gradient of a slice, and a step on it, in place."""

import keras
import numpy as np
from proof import equal, numbers, unchanged

import finetooth as ft

start = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
t = keras.Variable(start)
piece = ft.Part(t, np.s_[0, :, 0])

loss, gradient = ft.gradients(lambda: keras.ops.sum(t**3), piece)
piece.assign_sub(0.1 * gradient)

expected = start.copy()
expected[0, :, 0] -= 0.1 * 3 * start[0, :, 0] ** 2
inside = np.zeros((2, 3, 4), bool)
inside[0, :, 0] = True
unchanged(start, t, inside)
equal("the step", numbers(t), expected)
