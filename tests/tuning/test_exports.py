"""What is exported of a model that is being tuned computes what the model computes, and tuning goes on."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import finetooth as ft

BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(2, 6)).astype("float32")
Y = np.zeros((2, 3), "float32")
PART = ["**/wide/kernel[:, :2]", "**/wide/bias[0]", "top/kernel[[0, 2], 1]", "top/bias"]


def network():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(4, "relu", name="wide")], name="inner")
    return keras.Sequential([keras.Input((6,)), inner, layers.Dense(3, name="top")], name="outer"), inner


def by_keras(model, path):
    """`model.export`, as Keras supports it on each backend."""
    if BACKEND == "torch":
        import torch

        signature = [keras.InputSpec(shape=X.shape, dtype="float32")]
        model.export(f"{path}.pt2", format="torch", input_signature=signature, verbose=False)
        return torch.export.load(f"{path}.pt2").module()(ops.convert_to_tensor(X))
    import tensorflow as tf

    model.export(path, verbose=False)
    loaded = tf.saved_model.load(path)
    return loaded.serve(X)


def by_archive(model, path):
    import tensorflow as tf

    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.call, [keras.InputSpec(shape=(None, 6), dtype="float32")])
    archive.write_out(path, verbose=False)
    loaded = tf.saved_model.load(path)
    return loaded.serve(X)


def by_tensorflow(model, path):
    import tensorflow as tf

    tf.saved_model.save(model, path)
    loaded = tf.saved_model.load(path)
    return loaded.signatures["serving_default"](tf.constant(X))["output_0"]


def by_checkpoint(model, path):
    import tensorflow as tf

    saved = tf.train.Checkpoint(model=model).save(path)
    kept = model.get_weights()
    model.set_weights([np.zeros_like(w) for w in kept])
    tf.train.Checkpoint(model=model).restore(saved).expect_partial()
    return model.predict(X, verbose=0)


def to_lite(model, path):
    import tensorflow as tf

    content = tf.lite.TFLiteConverter.from_keras_model(model).convert()
    lite = tf.lite.Interpreter(model_content=content)
    given, made = lite.get_input_details()[0]["index"], lite.get_output_details()[0]["index"]
    lite.resize_tensor_input(given, X.shape)
    lite.allocate_tensors()
    lite.set_tensor(given, X)
    lite.invoke()
    return lite.get_tensor(made)


def by_torch(model, path):
    import torch

    x = ops.convert_to_tensor(X)
    return torch.export.export(model, (x,)).module()(x)


WAYS = {
    "tensorflow": [by_keras, by_archive, by_tensorflow, by_checkpoint, to_lite],
    "jax": [by_keras, by_archive],
    "torch": [by_keras, by_torch],
}[BACKEND]


@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("which", ["outer", "inner", "sharing"])
def test_an_exported_model_computes_the_same(way, which, tmp_path):
    outer, inner = network()
    sharing = keras.Sequential([keras.Input((6,)), inner.layers[0], layers.Dense(1)], name="sharing")
    model = {"outer": outer, "inner": inner, "sharing": sharing}[which]
    with ft.tune(outer, *PART) as tuning:
        outer.compile("sgd", "mse", run_eagerly=True)
        outer.fit(X, Y, verbose=0)
        expected = model.predict(X, verbose=0)
        given = way(model, str(tmp_path / "model"))
        np.testing.assert_allclose(ops.convert_to_numpy(given), expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(model.predict(X, verbose=0), expected)
        outer.fit(X, Y, epochs=2, verbose=0)
        assert (model.predict(X, verbose=0) != expected).any()
    assert tuning.verify()


if BACKEND == "torch":

    def numbers(state):
        return {name: value.detach().numpy().copy() for name, value in state.items()}

    def test_the_state_of_a_module_is_that_of_the_plain_module():
        import torch

        outer, inner = network()
        sharing = keras.Sequential([keras.Input((6,)), inner.layers[0], layers.Dense(1)])
        modules = [outer, inner, inner.layers[0], sharing, torch.nn.Sequential(outer)]
        names = [list(module.state_dict()) for module in modules]
        with ft.tune(outer, *PART) as tuning:
            outer.compile("sgd", "mse")
            outer.fit(X, Y, verbose=0)
            outer.get_weights()  # Keras lists variables anew
            states = [numbers(module.state_dict()) for module in modules]
            kernel = outer.get_weights()[0]
        assert [list(state) for state in states] == names
        for module, state in zip(modules, states):
            for name, value in numbers(module.state_dict()).items():
                np.testing.assert_array_equal(value, state[name])
        assert any(value.shape == kernel.shape and (value == kernel).all() for value in states[0].values())
        assert tuning.verify()

    def test_a_plain_state_is_loaded_while_tuned():
        outer, inner = network()
        state = {name: value.clone() for name, value in outer.state_dict().items()}
        before = outer.get_weights()
        with ft.tune(outer, *PART) as tuning:
            outer.compile("sgd", "mse")
            outer.fit(X, Y, verbose=0)
            trained = outer.get_weights()
            assert any((a != b).any() for a, b in zip(trained, before))
            outer.load_state_dict(state)
            for one, other in zip(outer.get_weights(), before):
                np.testing.assert_array_equal(one, other)
            outer.fit(X, Y, verbose=0)
            for one, other in zip(outer.get_weights(), trained):
                np.testing.assert_array_equal(one, other)
            outer.load_state_dict({}, strict=False)
            for one, other in zip(outer.get_weights(), trained):
                np.testing.assert_array_equal(one, other)
        for one, other in zip(outer.get_weights(), trained):
            np.testing.assert_array_equal(one, other)
        assert tuning.verify()
