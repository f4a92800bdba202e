"""The settings that all optimizers share."""

from __future__ import annotations

import keras

RATE = 1e-6  # next to nothing, so that activations stay as they are: units that die make a GPU faster
BETAS = 0.9, 0.99  # 0.999 is 1 in bfloat16, and Keras' Adam then moves nothing


def made(optimizer: type[keras.optimizers.Adam]) -> keras.optimizers.Adam:
    return optimizer(RATE, beta_1=BETAS[0], beta_2=BETAS[1])
