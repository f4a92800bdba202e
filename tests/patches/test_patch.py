"""A patch holds old and new values; applying and reverting are exact, or refused with nothing changed."""

import keras
import numpy as np
import pytest
from helpers import copy_of, values

import finetooth as ft
from finetooth.patches.patch import Change
from finetooth.regions import bits

L = keras.layers


def network(dtype="float32"):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,))
    x = L.Dense(6, "tanh", name="in", dtype=dtype)(inputs)
    return keras.Model(inputs, L.Dense(3, name="out", dtype=dtype)(x))


def trained(dtype="float32"):
    model = network(dtype)
    base = copy_of(model)
    rng = np.random.default_rng(0)
    part = ft.select(model, "in/kernel[:, 1:3]", ("out/kernel", np.eye(6, 3, dtype=bool)), "out/bias")
    with ft.tune(model, part) as tuning:
        model.compile(keras.optimizers.AdamW(0.05), "mse")
        model.fit(rng.normal(size=(16, 5)), rng.normal(size=(16, 3)), verbose=0)
    return base, model, tuning.patch


def same(a, b):
    return all(not bits.differing(a[path], b[path]).any() for path in a)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_apply_and_revert_are_exact(dtype):
    base, model, patch = trained(dtype)
    before, after = values(base), values(model)
    assert not same(before, after)
    patch.apply(base)
    assert same(values(base), after)
    patch.revert(base)
    assert same(values(base), before)


def pair(old, new, **options):
    """Two models whose one weight has these values."""
    models = []
    for value in (old, new):
        keras.backend.clear_session(free_memory=False)
        model = keras.Sequential([keras.Input((4,)), L.Dense(1, use_bias=False, name="d", **options)])
        model.get_layer("d").kernel.assign(np.reshape(value, (4, 1)))
        models.append(model)
    return models


def test_a_patch_keeps_signed_zeros():
    """Trap: a patch of differences turns -0.0 into 0.0."""
    base, model = pair([-0.0, -0.0, 0.0, 1.0], [0.0, 1.0, -0.0, 2.0])
    before, after = values(base), values(model)
    patch = ft.diff(base, model)
    assert np.signbit(before["d/kernel"][:2]).all() and patch.size == 4
    patch.apply(base)
    assert same(values(base), after)
    patch.revert(base)
    assert same(values(base), before)


def test_bits_differ_and_not_values():
    """The sign of a zero counts, and a NaN is the same as itself."""
    base, model = pair([0.0, np.nan, 1.0, 0.0], [-0.0, np.nan, 1.0, 0.0])
    patch = ft.diff(base, model)
    assert patch["d/kernel"].region.flat().tolist() == [0] and patch["d/kernel"].moved == 1
    region = ft.Whole((4, 1))
    change = Change(region, values(base)["d/kernel"], values(model)["d/kernel"])
    assert change.moved == 1
    assert Change(region, change.new, change.new).moved == 0
    patch.apply(base)
    assert same(values(base), values(model))


def test_a_patch_of_complex_numbers():
    models = []
    for value in ([1, 2j, 0, -1j], [1, 3j, 0, 1j]):
        keras.backend.clear_session(free_memory=False)
        layer = L.Layer(name="layer")
        layer.add_weight(shape=(4,), dtype="complex64", name="w", initializer="zeros", trainable=False)
        models.append(keras.Sequential([keras.Input((4,)), layer]))
        layer.weights[0].assign(np.array(value, "complex64"))
    patch = ft.diff(*models)
    assert patch["layer/w"].region.flat().tolist() == [1, 3] and "2" in patch.table().rows[0][-1]
    patch.apply(models[0])
    assert same(*(values(model) for model in models))


def test_it_holds_the_selection_and_nothing_else():
    base, model, patch = trained()
    assert list(patch) == ["in/kernel", "out/kernel", "out/bias"]
    assert patch["in/kernel"].old.shape == (5, 2) and patch["out/kernel"].new.shape == (3,)
    assert patch.size == 10 + 3 + 3 and patch.nbytes == 4 * patch.size
    np.testing.assert_array_equal(patch["in/kernel"].old, values(base)["in/kernel"][:, 1:3])
    np.testing.assert_array_equal(patch["in/kernel"].new, values(model)["in/kernel"][:, 1:3])
    assert "in/kernel" in patch and "in/bias" not in patch
    assert "largest move" in str(patch) and "<table>" in patch._repr_html_()


def misfits():
    yield "other values", lambda: network(), lambda m: m.get_layer("in").kernel.assign(np.ones((5, 6))), "do not hold"
    yield "one bit at the end", lambda: network(), lambda m: m.get_layer("out").bias.assign([0, -0.0, 0]), "1 of 3"
    yield "another dtype", lambda: network("bfloat16"), lambda m: None, "bfloat16"
    yield "another shape", lambda: other_shape(), lambda m: None, "shape"
    yield "another name", lambda: other_name(), lambda m: None, "no such variable"


def other_shape():
    inputs = keras.Input((5,))
    return keras.Model(inputs, L.Dense(4, name="out")(L.Dense(6, name="in")(inputs)))


def other_name():
    inputs = keras.Input((5,))
    x = L.Dense(6, name="in")(L.Dense(5, name="extra")(inputs))
    return keras.Model(inputs, L.Dense(3, name="out_2")(x))


@pytest.mark.parametrize("case", misfits(), ids=lambda case: case[0])
def test_a_model_that_does_not_fit_is_refused_whole(case):
    _, make, change, message = case
    base, _, patch = trained()
    model = make()
    if [w.shape for w in model.weights] == [w.shape for w in base.weights] and "bfloat16" not in message:
        model.set_weights(base.get_weights())
    change(model)
    before = values(model)
    for write in (patch.apply, patch.revert):
        with pytest.raises(ft.PatchError, match="nothing was changed"):
            write(model)
    with pytest.raises(ft.PatchError, match=message):
        patch.apply(model)
    assert same(before, values(model))


def test_a_patch_cannot_be_applied_twice_or_reverted_first():
    base, model, patch = trained()
    with pytest.raises(ft.PatchError, match="revert"):
        patch.revert(base)
    patch.apply(base)
    with pytest.raises(ft.PatchError, match="apply"):
        patch.apply(base)


def test_revert_after_finish():
    model = network()
    before = values(model)
    with ft.tune(model, "in/kernel[0]") as tuning:
        model.compile("adam", "mse")
        model.fit(np.ones((4, 5)), np.ones((4, 3)), verbose=0)
    assert not same(before, values(model))
    tuning.revert()
    assert same(before, values(model))


def test_diff_finds_exactly_what_differs():
    base, model, patch = trained()
    found = ft.diff(base, model)
    for path, change in found.items():
        assert change.region <= patch[path].region
        np.testing.assert_array_equal(change.region.gather(values(model)[path]), change.new)
    assert found.size == sum(change.moved for _, change in patch.items())
    found.apply(base)
    assert same(values(base), values(model))
    assert ft.diff(base, model).size == 0
    with pytest.raises(ft.PatchError, match="only one"):
        ft.diff(base, other_name())
    with pytest.raises(ft.PatchError, match="float32"):
        ft.diff(base, other_shape())


def test_a_model_that_is_being_tuned_takes_no_patch():
    base, _, patch = trained()
    before = values(base)
    with ft.tune(base, "in/kernel[0]"):
        with pytest.raises(ft.PatchError, match="being tuned"):
            patch.apply(base)
    assert same(before, values(base))


def test_a_model_whose_automatic_names_differ_is_refused_with_the_way_out():
    def automatic():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), keras.layers.Dense(3)])

    model, other = automatic(), automatic()
    with ft.tune(model, "dense/kernel[0]") as tuning:
        model.compile("sgd", "mse")
        model.fit(keras.ops.ones((4, 4)), keras.ops.ones((4, 3)), verbose=0)
    before = values(other)
    for refused, nearest in ((lambda: tuning.patch.apply(other), "kernel"), (lambda: ft.diff(model, other), "bias")):
        with pytest.raises(ft.PatchError, match=f"nearest of that shape is 'dense_2/{nearest}'.*clone_model"):
            refused()
    assert all((value == before[path]).all() for path, value in values(other).items())
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    tuning.patch.revert(copy)
    assert ft.diff(copy, model).size == tuning.patch["dense/kernel"].moved


def test_the_patch_of_a_reverted_tuning_changes_nothing():
    model = network()
    before = values(model)
    with ft.tune(model, "in/kernel[:, 1:3]") as tuning:
        model.compile(keras.optimizers.SGD(1.0), "mse", run_eagerly=keras.backend.backend() != "jax")
        model.train_on_batch(np.ones((4, 5)), np.ones((4, 3)))
        assert tuning.patch["in/kernel"].moved > 0
        tuning.revert()
    change = tuning.patch["in/kernel"]
    assert change.moved == 0 and (change.new == before["in/kernel"][:, 1:3]).all()
    tuning.patch.apply(model)
    assert all((before[path] == value).all() for path, value in values(model).items())
