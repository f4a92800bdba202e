"""A part of any weight of any layer trains, and nothing else moves."""

import keras
import numpy as np
import pytest
from helpers import cases, moved_outside, random_selection, values
from zoo import FOREIGN, LAYERS, classes, data_for, model_with

import finetooth as ft

# How a model can be run, the usual way first.
BACKEND = keras.backend.backend()
MODES = {
    "tensorflow": {"graph": {}, "xla": {"jit_compile": True}, "eager": {"run_eagerly": True}},
    "jax": {"jit": {}, "eager": {"jit_compile": False, "run_eagerly": True}},
    "torch": {"eager": {}, "compiled": {"jit_compile": True}},
}[BACKEND]
# One of each rule, and of each kind of layer that is read in its own way: these stand for the rest in `make test`.
KINDS = {
    *("Dense", "EinsumDense", "Embedding", "ReversibleEmbedding", "Conv2D", "SeparableConv2D", "MultiHeadAttention"),
    *("GRU", "StackedRNNCells", "BatchNormalization", "LayerNormalization", "SpectralNormalization", "CustomLayer"),
}
OTHERWISE = {"tensorflow": {"Dense", "Embedding", "Conv2D", "GRU"}, "jax": {"Dense"}, "torch": set()}[BACKEND]


def test_every_layer_class_with_weights_is_covered():
    assert classes() - FOREIGN == set(LAYERS) - {"CustomLayer"}


def step(name, options, selection=None):
    """The weights after one step of SGD: of the selection where there is one, of everything in plain Keras if not."""
    model = model_with(name)
    x, y = data_for(name)
    if selection is None:
        for layer in model.layers:
            if isinstance(layer, keras.layers.SpectralNormalization):
                # Plain Keras rescales the kernel in the forward pass of training. A partly frozen one stays as it is.
                layer.call = lambda x, training, stock=layer.call: stock(x, training=False)
        model.compile(keras.optimizers.SGD(0.1), "mse", **options)
        model.train_on_batch(x, y)
        return values(model), None
    with ft.tune(model, selection, statistics="update") as tuning:
        model.compile(keras.optimizers.SGD(0.1), "mse", **options)
        model.train_on_batch(x, y)
    return values(model), tuning


def check_step(name, modes, rng):
    model = model_with(name)
    before, selection = values(model), random_selection(model, rng)
    expected, _ = step(name, next(iter(MODES.values())))
    for mode in modes:
        after, tuning = step(name, MODES[mode], selection)
        assert tuning.verify(), mode
        assert moved_outside(before, after, selection, free=tuning.moving) == {}, mode
        for path, region in selection.items():
            moved = [np.abs(region.gather(v[path]) - region.gather(before[path])).max() for v in (after, expected)]
            assert moved[0] > 0 or moved[1] < 1e-6, (mode, path)  # an attention's key bias has no gradient
            actual, wanted = region.gather(after[path]), region.gather(expected[path])
            np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-6, err_msg=f"{mode} {path}")


@pytest.mark.parametrize("name", cases(LAYERS, quick=lambda name: BACKEND != "jax" or name in KINDS))
def test_one_step_equals_the_selected_elements_of_plain_training(name, rng):
    """The oracle is plain Keras: one SGD step on the full gradient, of which the selected elements must come out."""
    check_step(name, list(MODES)[:1], rng)


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about Keras, and about itself
@pytest.mark.parametrize("name", cases(LAYERS, quick=lambda name: name in OTHERWISE))
def test_one_step_equals_plain_training_in_the_other_modes(name, rng):
    check_step(name, list(MODES)[1:], rng)
