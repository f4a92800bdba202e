"""Gradients for several subsets, parts of variables among them, from one forward pass."""

import keras
import numpy as np
from proof import equal

import finetooth as ft

rng = np.random.default_rng(0)
x, w0, b0 = (rng.normal(size=shape).astype("float32") for shape in [(8, 4), (4, 3), (3,)])
w, b = keras.Variable(w0), keras.Variable(b0)
column = ft.Part(w, np.s_[:, 1])
passes = []


def loss():
    passes.append(1)
    return keras.ops.sum((keras.ops.matmul(x, w) + b) ** 2)


run = ft.Pass(loss, [w, b, column])
residual = 2 * (x @ w0 + b0)
equal("for w", run.gradients(w), x.T @ residual, 1e-4)
of_b, of_column = run.gradients([b, column])
equal("for b", of_b, residual.sum(axis=0), 1e-4)
equal("for a column of w", of_column, (x.T @ residual)[:, 1], 1e-4)
print(f"forward passes: {len(passes)}")
if len(passes) != 1:
    raise SystemExit("Not what was promised.")
