"""Where a rule may not stand in for a layer's call, because the call is the user's or the input is sparse, the layer
runs as in plain Keras and reads the merged weights."""

import functools

import keras
import numpy as np
import pytest
from helpers import mask_of, values

import finetooth as ft

L = keras.layers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 8)).astype("float32"), RNG.normal(size=(16, 4)).astype("float32")
IMAGES = RNG.normal(size=(4, 5, 5, 2)).astype("float32")


def model_of(layer, shape=(8,), **options):
    keras.utils.set_random_seed(1)
    inputs = keras.Input(shape, **options)
    x = layer(inputs)
    return keras.Model(inputs, L.Dense(4, name="head")(L.Flatten()(x) if len(x.shape) > 2 else x))


def train(model, x):
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model.train_on_batch(x, Y[: x.shape[0]])


def check_as_plain(make, path, index, x, rule="dense"):
    """The tuned model computes as the plain one, and its region gets the update of a plain step."""
    plain, model = make(), make()
    model.set_weights(plain.get_weights())
    before, predicted = values(model), keras.ops.convert_to_numpy(plain(x))
    train(plain, x)
    selection = ft.select(model, (path, index))
    with ft.tune(model, selection) as tuning:
        assert tuning.table().rows[0][-1] == rule
        np.testing.assert_allclose(keras.ops.convert_to_numpy(model(x)), predicted, rtol=1e-5, atol=1e-6)
        train(model, x)
        assert tuning.verify()
    where, after = mask_of(selection[path]), values(plain)[path]
    assert (after[where] != before[path][where]).any()
    np.testing.assert_allclose(values(model)[path], np.where(where, after, before[path]), rtol=1e-5, atol=1e-6)


def patched_instance():
    model = model_of(L.Dense(6, name="layer"))
    layer = model.get_layer("layer")
    original = layer.call
    layer.call = functools.wraps(original)(lambda inputs, training=None: original(inputs) * 3.0 + 1.0)
    return model


def patched_convolution():
    model = model_of(L.Conv2D(3, 2, name="layer"), (5, 5, 2))
    layer = model.get_layer("layer")
    original = layer.convolution_op
    layer.convolution_op = lambda inputs, kernel: original(inputs, kernel) * 2.0
    return model


def test_a_call_patched_on_the_instance_is_called():
    check_as_plain(patched_instance, "layer/kernel", np.s_[:, :3], X)


def test_a_convolution_patched_on_the_instance_is_called():
    check_as_plain(patched_convolution, "layer/kernel", np.s_[..., :2], IMAGES)


def wrapped_by_user(original):
    @functools.wraps(original)  # so `__module__` says Keras
    def call(self, *args, **kwargs):
        return original(self, *args, **kwargs) * 2.0

    return call


@pytest.mark.parametrize(
    "layer", [lambda: L.Dense(6, name="layer"), lambda: L.EinsumDense("ab,bc->ac", 6, name="layer")]
)
def test_a_call_patched_on_the_class_is_called(layer, monkeypatch):
    kind = type(layer())
    monkeypatch.setattr(kind, "call", wrapped_by_user(kind.call))
    check_as_plain(lambda: model_of(layer()), "layer/kernel", np.s_[:, :3], X)


def test_a_call_patched_on_a_base_class_is_called(monkeypatch):
    monkeypatch.setattr(L.Embedding, "call", wrapped_by_user(L.Embedding.call))
    tokens = RNG.integers(0, 7, (16, 3))
    check_as_plain(
        lambda: model_of(L.ReversibleEmbedding(7, 4, name="layer"), (3,)), "layer/embeddings", np.s_[2:5], tokens
    )


def hooked_by_us():
    model = model_of(L.Dense(6, name="layer"))
    with ft.tune(model, "head/bias", "layer/bias[0]"):  # leaves no trace that a later tuning would take for a patch
        model.predict_on_batch(X)
    return model


def test_a_layer_that_was_tuned_before_has_its_rule():
    check_as_plain(hooked_by_us, "layer/kernel", np.s_[:, :3], X, rule="slice")


def test_hooks_of_selective_backprop_are_not_patches():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,), dtype="int32")
    model = keras.Model(inputs, L.Dense(5, name="head")(L.Embedding(5, 4)(inputs)))
    tokens = RNG.integers(0, 5, (4, 3))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with ft.selective_backprop(model, 0.5, tokens=True), ft.tune(model, "head/kernel[:, :2]") as tuning:
        assert "slice" in str(tuning)
        model.train_on_batch(tokens, tokens)
        assert tuning.verify()


def sparse(array):
    """A sparse tensor of the backend; dense where Keras has none."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.sparse.from_dense(array)
    if keras.backend.backend() == "jax":
        from jax.experimental.sparse import BCOO

        return BCOO.fromdense(array)
    return array


SELDOM = np.where(RNG.uniform(size=X.shape) < 0.3, X, 0).astype("float32")


@pytest.mark.parametrize(
    ("index", "rule"), [(np.s_[:, :3], "slice"), (np.s_[[1, 4]], "slice"), (np.eye(8, 6, dtype=bool), "dense")]
)
def test_sparse_inputs_are_read_as_in_plain_keras(index, rule):
    options = {} if keras.backend.backend() == "torch" else {"sparse": True}
    make = lambda: model_of(L.Dense(6, "tanh", name="layer"), **options)  # noqa: E731
    check_as_plain(make, "layer/kernel", index, sparse(SELDOM), rule)
