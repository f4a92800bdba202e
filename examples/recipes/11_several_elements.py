"""Set several elements. Each is named once: what would it mean to write one twice?"""

import keras
import numpy as np
from proof import equal, unchanged

import finetooth as ft

start = np.arange(12, dtype="float32").reshape(3, 4)
w = keras.Variable(start)
mask = np.zeros((3, 4), bool)
mask[[0, 1, 2], [3, 0, 2]] = True
ft.Part(w, mask).assign([10, 20, 30])
ft.Part(w, np.s_[[2, 0], 1]).assign([5, 6])

expected = start.copy()
expected[mask] = [10, 20, 30]
expected[[2, 0], 1] = [5, 6]
unchanged(start, w, expected != start)
equal("NumPy", w, expected, 0)
try:
    ft.Part(w, np.s_[[1, 1]])
except ft.SelectionError as error:
    print(error)
else:
    raise SystemExit("Not what was promised.")
