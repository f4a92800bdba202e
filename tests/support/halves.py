"""Models trained as a whole, and by halves."""

import keras
import numpy as np

import finetooth as ft


def data(*shapes, n=20, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, *shape)).astype("float32") for shape in shapes]


def trained(make, selection, x, y, by_halves, run_eagerly=False):
    """A model trained for three epochs, and what happened."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    model = make()
    with ft.tune(model, ft.select(model, *selection)) as tuning:
        if by_halves:
            split = tuning.split()
            features = split.features(x, verbose=0)
        trainee, inputs = (split.upper, features) if by_halves else (model, x)
        trainee.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=run_eagerly)
        history = trainee.fit(inputs, y, epochs=3, batch_size=10, shuffle=False, verbose=0).history
    assert tuning.verify()
    return model, history, split if by_halves else None
