"""Layers that wrap code of one framework, which reads weights in its own way."""

import keras
import numpy as np
from helpers import moved_outside, values

import finetooth as ft

BACKEND = keras.backend.backend()


def torch_model():
    import torch

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
    inputs = keras.Input((5,))
    x = keras.layers.TorchModuleWrapper(module, output_shape=(None, 4), name="wrapped")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(x))


def jax_model():
    import jax.numpy as jnp

    def call(params, inputs):
        return jnp.tanh(inputs @ params["w"] + params["b"])

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(5, 4)).astype("float32"), "b": np.zeros(4, "float32")}
    inputs = keras.Input((5,))
    x = keras.layers.JaxLayer(call_fn=call, params=params, name="wrapped")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(x))


def check_part(make):
    """A part of every wrapped weight trains as in plain Keras, and is seen by whoever calls the model."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(8, 5)).astype("float32"), rng.normal(size=(8, 3)).astype("float32")
    plain, model = make(), make()
    model.set_weights(plain.get_weights())
    wrapped = model.get_layer("wrapped")
    before = values(model)
    selection = ft.select(model, *((v, (slice(0, 2),)) for v in wrapped.weights))
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    plain.train_on_batch(x, y)
    with ft.tune(model, selection) as tuning:
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.train_on_batch(x, y)
        merged = model.predict(x, verbose=0)
    after = values(model)
    np.testing.assert_allclose(model.predict(x, verbose=0), merged, rtol=1e-6, atol=1e-6)
    assert tuning.verify() and moved_outside(before, after, selection) == {}
    for (path, region), expected in zip(selection.items(), plain.get_layer("wrapped").get_weights()):
        np.testing.assert_allclose(region.gather(after[path]), region.gather(expected), rtol=1e-5, atol=1e-6)
        assert (region.gather(after[path]) != region.gather(before[path])).all()


if BACKEND == "torch":

    def test_a_part_of_a_torch_module_trains():
        check_part(torch_model)

    def test_a_wrapped_module_is_saved_merged_and_keeps_its_parameters(tmp_path):
        model = torch_model()
        module = model.get_layer("wrapped").module
        parameters = [id(p) for p in module.parameters()]
        rng = np.random.default_rng(1)
        with ft.tune(model, ft.select(model, (model.get_layer("wrapped").weights[0], 0))):
            model.compile("adam", "mse")
            model.fit(rng.normal(size=(8, 5)), rng.normal(size=(8, 3)), verbose=0)
            model.save_weights(tmp_path / "m.weights.h5")
            other = torch_model()
            other.load_weights(tmp_path / "m.weights.h5")
        assert [id(p) for p in module.parameters()] == parameters
        for a, b in zip(model.get_weights(), other.get_weights()):
            np.testing.assert_array_equal(a, b)

elif BACKEND == "jax":

    def test_a_part_of_a_jax_function_trains():
        check_part(jax_model)
