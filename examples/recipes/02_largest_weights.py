"""Train the 20% of the weights that are largest, chosen anew from time to time."""

import keras
import numpy as np
from proof import numbers, unchanged

import finetooth as ft

rng = np.random.default_rng(0)
start, target = rng.integers(-3, 4, size=(2, 10, 10)).astype("float32")  # with many ties
w = keras.Variable(start)


def largest(value, share):
    """Exactly this share, always the same where weights are tied."""
    order = np.argsort(-np.abs(value), axis=None, kind="stable")
    mask = np.zeros(value.size, bool)
    mask[order[: round(share * value.size)]] = True
    return mask.reshape(value.shape)


mask = largest(numbers(w), 0.2)
optimizer = ft.SelectiveOptimizer(keras.optimizers.Adam(0.1), [(w, mask)])
for _ in range(3):
    before = numbers(w)
    for _ in range(5):
        loss, gradient = ft.gradients(lambda: keras.ops.sum((w - target) ** 2), w)
        optimizer.apply([gradient], [w])
    print(f"{int(mask.sum())} of {mask.size} weights train")
    unchanged(before, w, mask)
    mask = largest(numbers(w), 0.2)
    optimizer = optimizer.reselected([(w, mask)])  # elements that stay keep their moments

print(f"after {int(optimizer.iterations)} steps")
