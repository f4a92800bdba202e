"""Set one element of a variable, in place."""

import keras
import numpy as np
from proof import equal, unchanged

import finetooth as ft

start = np.arange(12, dtype="float32").reshape(3, 4)
w = keras.Variable(start)
ft.Part(w, np.s_[1, 2]).assign(99)

expected = start.copy()
expected[1, 2] = 99
unchanged(start, w, expected != start)
equal("NumPy", w, expected, 0)
