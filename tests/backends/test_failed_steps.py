"""No step that fails loses weights: JAX's trainer takes them out of the variables while it runs."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import finetooth as ft

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")


class Broken(Exception):
    pass


@keras.saving.register_keras_serializable()
class Breaking(layers.Layer):
    """Raises when it is called, while `broken`."""

    broken = False

    def call(self, x):
        if self.broken:
            raise Broken
        return x


class BreakingMetric(keras.metrics.Mean):
    broken = False

    def update_state(self, *args, **kwargs):
        if self.broken:
            raise Broken
        super().update_state(0.0)


BREAKING = [(step, "layer") for step in ("fit", "evaluate", "predict", "train_on_batch", "predict_on_batch")]
BREAKING += [(step, "metric") for step in ("fit", "evaluate", "test_on_batch")]


@pytest.mark.parametrize("step, where", BREAKING)
def test_a_step_that_raises_leaves_all_weights_in_place(step, where):
    layer, metric = Breaking(), BreakingMetric()
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, name="below"), layer, layers.Dense(3)])
    with ft.tune(model, "below/kernel[:, :2]"):
        model.compile("adam", "mse", metrics=[metric])
        model.fit(X, Y, verbose=0)
        variables = [*model.weights, *model.optimizer.variables]
        before = [np.array(ops.convert_to_numpy(v)) for v in variables]
        broken = layer if where == "layer" else metric
        broken.broken = True
        model.train_function = model.test_function = model.predict_function = None  # compile what is broken now
        options = {} if "batch" in step else {"verbose": 0}
        with pytest.raises(Exception) as error:
            getattr(model, step)(*([X] if "predict" in step else [X, Y]), **options)
        assert "Broken" in repr(error.value)
        after = [np.array(ops.convert_to_numpy(v)) for v in variables]
        if (step, where) != ("fit", "metric"):  # PyTorch has moved the weights by then
            for one, other in zip(before, after):
                np.testing.assert_array_equal(one, other)
        broken.broken = False
        model.compile("adam", "mse")
        model.fit(X, Y, verbose=0)


def test_a_tuned_layer_normalises_by_its_frozen_statistics_in_training_too():
    """The loss of a step is that of the formula for inference, as statistics that nobody updates must be those used."""
    rng = np.random.default_rng(2)
    norm = layers.BatchNormalization(name="norm", epsilon=0.1)
    model = keras.Sequential([keras.Input((6,)), norm])
    gamma, beta, mean, variance = values = [rng.uniform(0.5, 2.0, 6).astype("float32") for _ in range(4)]
    norm.set_weights(values)
    x, y = (rng.normal(size=(8, 6)) for _ in range(2))
    expected = np.mean((gamma * (x - mean) / np.sqrt(variance + 0.1) + beta - y) ** 2)
    by_batch = np.mean((gamma * (x - x.mean(0)) / np.sqrt(x.var(0) + 0.1) + beta - y) ** 2)
    assert abs(expected - by_batch) > 0.1
    with ft.tune(model, "norm/gamma[:3]", "norm/beta"):
        model.compile("sgd", "mse", run_eagerly=True)
        assert model.train_on_batch(x, y) == pytest.approx(expected, rel=1e-5)
    for after, before in zip(norm.get_weights()[2:], (mean, variance)):
        np.testing.assert_array_equal(after, before)
