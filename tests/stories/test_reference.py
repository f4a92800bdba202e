"""Inside the selection, training is what a float64 NumPy reference says; selecting everything is plain training."""

import keras
import numpy as np
import oracle
import pytest
from helpers import cases, values
from hypothesis import given, settings
from hypothesis import strategies as st

import finetooth as ft
from finetooth.regions.indexing import region_at
from finetooth.regions.region import Whole

STEPS, BATCH, SHAPES = 10, 6, {"in/kernel": (5, 7), "in/bias": (7,), "out/kernel": (7, 3), "out/bias": (3,)}
OPTIMIZERS = {
    "sgd": (lambda **k: keras.optimizers.SGD(0.2, **k), oracle.sgd(0.2)),
    "momentum": (lambda **k: keras.optimizers.SGD(0.05, momentum=0.9, **k), oracle.sgd(0.05, 0.9)),
    "sgd, decay": (lambda **k: keras.optimizers.SGD(0.2, weight_decay=0.1, **k), oracle.sgd(0.2, decay=0.1)),
    "adam": (lambda **k: keras.optimizers.Adam(0.02, **k), oracle.adam(0.02)),
    "adamw": (lambda **k: keras.optimizers.AdamW(0.02, weight_decay=0.1, **k), oracle.adam(0.02, 0.1)),
    "rmsprop": (lambda **k: keras.optimizers.RMSprop(0.01, **k), oracle.rmsprop(0.01)),
}
CLIPS = {
    "": ({}, lambda g: g),
    "global_clipnorm": ({"global_clipnorm": 0.05}, lambda g: oracle.clip_globally(g, 0.05)),
    "clipnorm": ({"clipnorm": 0.05}, lambda g: oracle.clip_each(g, 0.05)),
    "clipvalue": ({"clipvalue": 0.01}, lambda g: {path: np.clip(v, -0.01, 0.01) for path, v in g.items()}),
}


def network():
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(7, "tanh", name="in", bias_initializer="normal")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="out", bias_initializer="normal")(hidden))


def batches():
    rng = np.random.default_rng(4)
    return [
        (rng.normal(size=(BATCH, 5)).astype("float32"), rng.normal(size=(BATCH, 3)).astype("float32"))
        for _ in range(STEPS)
    ]


def fit(model, optimizer):
    x, y = (np.concatenate(side) for side in zip(*batches()))
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


def check(selection, optimizer, update, clip=lambda g: g):
    model = network()
    before = values(model)
    with ft.tune(model, ft.select(model, selection)):
        fit(model, optimizer)
    masks = {path: region.mask() for path, region in selection.items()}
    expected = oracle.train(before, masks, batches(), update, clip)
    for path, after in values(model).items():
        np.testing.assert_allclose(after, expected[path], rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.parametrize(
    ("name", "clip"), cases(OPTIMIZERS, CLIPS, quick=lambda name, clip: not clip or name in ("adam", "momentum"))
)
def test_training_a_part_equals_the_reference(name, clip):
    model = network()
    make, update = OPTIMIZERS[name]
    options, clipping = CLIPS[clip]
    selection = ft.select(model, "in/kernel[1:4, ::3]", "in/bias[[0,2,5]]", ("out/kernel", np.eye(7, 3, dtype=bool)))
    check(selection, make(**options), update, clipping)


@st.composite
def regions(draw, shape):
    kind = draw(st.sampled_from(["whole", "slices", "indices", "mask"]))
    if kind == "whole":
        return Whole(shape)
    if kind == "mask":
        flat = draw(st.sets(st.integers(0, int(np.prod(shape)) - 1), min_size=1))
        mask = np.zeros(shape, bool)
        mask.reshape(-1)[list(flat)] = True
        return region_at(shape, mask)
    entries = []
    for n in shape:
        if kind == "indices":
            entries.append(sorted(draw(st.sets(st.integers(0, n - 1), min_size=1))))
        else:
            start = draw(st.integers(0, n - 1))
            entries.append(slice(start, draw(st.integers(start + 1, n)), draw(st.integers(1, 3))))
    return region_at(shape, tuple(entries))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_any_regions_with_any_optimizer_equal_the_reference(data):
    paths = data.draw(st.sets(st.sampled_from(sorted(SHAPES)), min_size=1))
    model = network()
    selection = ft.select(model, *((path, data.draw(regions(SHAPES[path]))) for path in sorted(paths)))
    make, update = OPTIMIZERS[data.draw(st.sampled_from(sorted(OPTIMIZERS)))]
    check(selection, make(), update)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_selecting_everything_is_plain_fit_to_the_bit(name):
    make, _ = OPTIMIZERS[name]
    plain, tuned = network(), network()
    fit(plain, make(global_clipnorm=1.0))
    with ft.tune(tuned, "**"):
        fit(tuned, make(global_clipnorm=1.0))
    assert ft.diff(plain, tuned).size == 0


def test_clipping_norms_are_taken_over_the_selection_alone():
    """One step of SGD with global_clipnorm=1 and a large loss moves the part by exactly the learning rate."""
    model = network()
    x, y = batches()[0]
    before = values(model)
    with ft.tune(model, "in/kernel[2]"):
        model.compile(keras.optimizers.SGD(0.1, global_clipnorm=1.0), "mse")
        model.train_on_batch(x, 1000 * y)
    step = values(model)["in/kernel"] - before["in/kernel"]
    np.testing.assert_allclose(np.linalg.norm(step), 0.1, rtol=1e-5)
