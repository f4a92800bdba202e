"""Train the elements that are above 0.8: a true step downhill for them, nothing for the others."""

import keras
import numpy as np
from proof import equal, numbers, unchanged

import finetooth as ft

start = np.random.default_rng(0).uniform(size=(4, 5)).astype("float32")
w = keras.Variable(start)
high = ft.Part(w, w > 0.8)

loss, gradient = ft.gradients(lambda: keras.ops.sum(w**2), high)
high.assign_sub(0.1 * gradient)

unchanged(start, w, start > 0.8)
equal("the step", numbers(w), np.where(start > 0.8, start - 0.1 * 2 * start, start))
