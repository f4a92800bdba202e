"""Models trained as a whole, and by halves."""

import keras
import numpy as np
import pytest
from traces import graph_of, state_of

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


def check_a_failing_split(model, what, x, shape, monkeypatch):
    """A split in which the layer `out` fails leaves the tuned model as it was, and can be made afterwards."""
    with ft.tune(model, what) as tuning:
        before, graph = state_of(model), graph_of(model)

        def fail(*_):
            raise RuntimeError("half-way")

        monkeypatch.setattr(model.get_layer("out"), "compute_output_spec", fail)
        with pytest.raises(RuntimeError, match="half-way"):
            tuning.split()
        monkeypatch.undo()
        assert state_of(model) == before and graph_of(model) == graph
        features = tuning.split().features(x, verbose=0)
        assert (features[0] if isinstance(features, list) else features).shape == shape
