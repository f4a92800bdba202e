"""Ways in which freezing a part of a tensor goes wrong elsewhere, each with the test that catches it.

Those that have a place of their own are not repeated: every optimizer and option in test_optimizers, statistics, dtypes
and NaN in test_tuning, clipping in test_reference, patches in test_patch.
"""

import keras
import numpy as np
import oracle
import pytest
from helpers import moved_outside, values

import finetooth as ft

L = keras.layers
PAIRS = {  # a Keras optimizer, and the reference for it
    "sgd": lambda: (keras.optimizers.SGD(0.1), oracle.sgd(0.1)),
    "adam": lambda: (keras.optimizers.Adam(0.1), oracle.adam(0.1)),
    "rmsprop": lambda: (keras.optimizers.RMSprop(0.1), oracle.rmsprop(0.1)),
}


def table_model():
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    words = keras.Input((4,), dtype="int32")
    return keras.Model(words, L.GlobalAveragePooling1D()(L.Embedding(6, 3, name="table")(words)))


@pytest.mark.parametrize("rows", ["[1:3]", "[[1, 2, 5]]", "[1:3, :2]"])
@pytest.mark.parametrize("optimizer", PAIRS)
def test_repeated_tokens_are_summed_before_the_optimizer_squares_them(rows, optimizer):
    """Keras on TensorFlow squares each occurrence of a row on its own; the float64 reference has the true sum."""
    keras_optimizer, update = PAIRS[optimizer]()
    model = table_model()
    before = values(model)["table/embeddings"].astype(np.float64)
    tokens, target = np.array([[1, 1, 1, 2], [5, 1, 2, 2]]), np.array([[1.0, 2.0, 3.0], [0.0, 1.0, -1.0]])
    with ft.tune(model, f"table/embeddings{rows}") as tuning:
        model.compile(keras_optimizer, "mse")
        model.train_on_batch(tokens, target)
    once = np.eye(6)[tokens]
    gradient = np.einsum("btv,bd->vd", once / 4, 2 * (once.mean(1) @ before - target) / target.size)
    region = tuning.selection["table/embeddings"]
    expected = update(region.gather(before), region.gather(gradient), {}, 1)
    np.testing.assert_allclose(region.gather(values(model)["table/embeddings"]), expected, rtol=1e-4, atol=1e-6)


def test_an_embedding_with_loss_scaling_and_accumulation():
    """Keras divides TensorFlow's sparse gradient by the scale and fails; the part's gradient is dense and small."""
    model = table_model()
    before = values(model)
    with ft.tune(model, "table/embeddings[1:4]") as tuning:
        model.compile(keras.optimizers.Adam(0.1, loss_scale_factor=8.0, gradient_accumulation_steps=2), "mse")
        model.fit(np.ones((8, 4), "int32"), np.ones((8, 3)), batch_size=2, verbose=0)
    assert moved_outside(before, values(model), tuning.selection) == {}
    assert tuning.patch["table/embeddings"].moved == 3  # token 1 alone was seen


def test_an_average_over_many_elements_does_not_round_the_frozen_ones():
    """An EMA that holds frozen weights rewrites one in two hundred of them by a bit; ours does not hold them."""
    model = keras.Sequential([keras.Input((400,)), L.Dense(300, name="d")])
    before = values(model)
    rng = np.random.default_rng(0)
    with ft.tune(model, "d/kernel[:, :3]") as tuning:
        model.compile(keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.97, ema_overwrite_frequency=5), "mse")
        model.fit(rng.normal(size=(200, 400)), rng.normal(size=(200, 300)), batch_size=2, verbose=0)
    assert moved_outside(before, values(model), tuning.selection) == {}


def test_training_everything_first_leaves_no_momentum_behind():
    """Ten dense steps build up momentum; then a part is tuned. Nothing of the old momentum moves the rest."""
    model = keras.Sequential([keras.Input((5,)), L.Dense(4, name="d")])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 5)), rng.normal(size=(40, 4))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(x, y, batch_size=4, verbose=0)
    before = values(model)
    with ft.tune(model, "d/kernel[0]") as tuning:
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(x, y, batch_size=2, verbose=0)
    assert moved_outside(before, values(model), tuning.selection) == {}


def test_a_selection_of_repeated_indices_is_a_set():
    model = keras.Sequential([keras.Input((5,)), L.Dense(4, name="d")])
    assert ft.select(model, ("d/kernel", [1, 1, 3, 1])) == ft.select(model, "d/kernel[[1, 3]]")
