"""Set a slice to a value that broadcasts, as in NumPy."""

import keras
import numpy as np
from proof import equal, unchanged

import finetooth as ft

start = np.arange(1, 25, dtype="float32").reshape(2, 3, 4)
w = keras.Variable(start)
ft.Part(w, np.s_[0, :, 1:3]).assign(-1)
ft.Part(w, np.s_[1]).assign_mul([[10], [100], [1000]])

expected = start.copy()
expected[0, :, 1:3] = -1
expected[1] *= [[10], [100], [1000]]
unchanged(start, w, expected != start)
equal("NumPy", w, expected, 0)
try:
    ft.Part(w, np.s_[0]).assign([1, 2, 3])
except ft.PartError as error:
    print(error)
else:
    raise SystemExit("Not what was promised.")
