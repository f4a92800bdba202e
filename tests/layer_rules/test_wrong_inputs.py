"""Inputs that do not fit: whatever rule a layer reads its part by, the error is that of the plain layer."""

import re

import keras
import numpy as np
import pytest
from helpers import values

import finetooth as ft

L = keras.layers


class Alone(keras.Model):
    """A layer behind no input of a fixed shape: TensorFlow then traces a wrong size as an unknown one."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def build(self, shape):
        self.layer.build(shape)

    def call(self, x):
        return keras.ops.cast(self.layer(x), "float32")


def floats(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def tokens(low, high):
    return np.random.default_rng(0).integers(low, high, (8, 6)).astype("int32")


CASES = {
    # name: the layer, what of it is selected, inputs that fit and that do not
    "dense": (lambda: L.Dense(6, name="a"), "a/kernel[:, :4]", floats(8, 5), floats(8, 3)),
    "dense, of sequences": (lambda: L.Dense(6, name="a"), "a/kernel[2:]", floats(8, 4, 5), floats(8, 4, 3)),
    "elements": (lambda: L.Dense(6, name="a"), ("a/kernel", np.eye(5, 6, dtype=bool)), floats(8, 5), floats(8, 3)),
    "einsum": (
        *(lambda: L.EinsumDense("abc,cde->abde", (None, 2, 4), name="a"), "a/kernel[:, 1]"),
        *(floats(8, 4, 5), floats(8, 4, 3)),
    ),
    "convolution": (lambda: L.Conv1D(4, 3, name="a"), "a/kernel[..., :2]", floats(8, 6, 2), floats(8, 6, 3)),
    "rows": (lambda: L.Embedding(9, 4, name="a"), "a/embeddings[2:5]", tokens(0, 9), tokens(7, 12)),
}


def outcome(kind, tuned):
    """The error of a fit on inputs that do not fit, if any, without what names depend on; and the weights after it."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    make, selection, good, bad = CASES[kind]
    model = Alone(make())
    model.build(good.shape)
    tuning = ft.tune(model, selection) if tuned else None
    model.compile(keras.optimizers.SGD(0.1), lambda y, p: keras.ops.mean(p**2))
    model.fit(good, np.zeros((8, 1)), verbose=0)
    said = None
    try:
        model.fit(bad, np.zeros((8, 1)), verbose=0)
    except Exception as error:
        # TensorFlow also names the nodes of the graph and how it was built.
        noise = r"^\s|node|stack trace|\[\[|Stack|dummy|^File|^$"
        said = type(error), [line for line in str(error).splitlines() if not re.search(noise, line)]
    if tuning:
        model.fit(good, np.zeros((8, 1)), verbose=0)
        tuning.finish()
    return said, values(model) if tuned else {}  # on JAX, plain Keras loses the weights of a step that fails


@pytest.mark.parametrize("kind", CASES)
def test_the_error_is_that_of_the_plain_layer_and_training_goes_on(kind):
    plain, _ = outcome(kind, tuned=False)
    said, after = outcome(kind, tuned=True)
    assert said == plain
    assert (plain is None) == (kind == "rows" and keras.backend.backend() == "jax")  # which clips an index
    if plain:
        assert plain[1], "the test leaves nothing of the message"
        assert all(np.isfinite(value).all() for value in after.values())
