"""tune, finish, revert: any model, stock Keras around it, and no trace afterwards."""

import gc
import subprocess
import sys
import weakref

import keras
import numpy as np
import pytest
from helpers import cases, copy_of, moved_inside, moved_outside, values
from traces import state_of

import finetooth as ft
from finetooth.keras_internals.weights import weights_by_path

L = keras.layers


def data(*shapes, n=24, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, *shape)).astype("float32") for shape in shapes]


def dense_model(**options):
    inputs = keras.Input((5,))
    x = L.Dense(6, "tanh", name="in", **options)(inputs)
    return keras.Model(inputs, L.Dense(3, name="out")(x))


def with_norm():
    inputs = keras.Input((5,))
    x = L.Dense(6, name="in")(inputs)
    x = L.BatchNormalization(name="bn")(x)
    x = L.Dense(6, name="mid")(x)
    x = L.BatchNormalization(name="bn2")(x)
    x = L.Dropout(0.3)(x)
    return keras.Model(inputs, L.Dense(3, name="out")(x))


# Models of every kind, each with a selection and data.


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [L.Dense(5, "tanh", name=f"block_{i}") for i in range(2)]
        self.out = L.Dense(3, name="out")
        self.scale = self.add_weight(shape=(3,), initializer="ones", name="scale")

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x) * self.scale


class Tied(keras.Model):
    """A language model whose head reads the embedding table directly, outside of the layer that owns it."""

    def __init__(self):
        super().__init__()
        self.table = L.Embedding(11, 4, name="table")
        self.mix = L.Dense(4, "tanh", name="mix")

    def call(self, tokens):
        x = self.mix(self.table(tokens))
        return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))


class TwoHalves(keras.Model):
    """Like a variational autoencoder: its loss calls the encoder and the decoder, never the model itself."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((5,)), L.Dense(2, name="code")], name="encoder")
        self.decoder = keras.Sequential([keras.Input((2,)), L.Dense(3, name="back")], name="decoder")
        self.temperature = self.add_weight(shape=(2,), initializer="ones", name="temperature")
        self.built = True

    def call(self, x):
        return x  # JAX's trainer insists on calling the model

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        decoded = self.decoder(self.encoder(x) * self.temperature)
        return keras.ops.mean((decoded - y) ** 2)


def sequential():
    return keras.Sequential([L.Dense(6, "tanh"), L.Dense(3)])


def nested():
    inner = keras.Sequential([keras.Input((5,)), L.Dense(6, name="a"), L.Dense(6, name="b")], name="inner")
    inputs = keras.Input((5,))
    return keras.Model(inputs, L.Dense(3, name="out")(inner(inputs)))


def shared():
    inputs = keras.Input((5,))
    layer = L.Dense(5, "tanh", name="shared")
    return keras.Model(inputs, L.Dense(3, name="out")(layer(layer(inputs) + 1.0)))


def two_outputs():
    inputs = {"a": keras.Input((5,), name="a"), "b": keras.Input((2,), name="b")}
    x = L.Concatenate()([inputs["a"], inputs["b"]])
    return keras.Model(inputs, {"y": L.Dense(3, name="y")(x), "z": L.Dense(1, name="z")(x)})


MODELS = {
    "functional": (dense_model, "in/kernel[:, 1:4]", [(5,), (3,)]),
    "sequential": (sequential, "dense/kernel[:, [0,1,4]]", [(5,), (3,)]),
    "subclassed": (Subclassed, "block_*/kernel[2:]", [(5,), (3,)]),
    "weights of the model itself": (Subclassed, "scale[1:]", [(5,), (3,)]),
    "nested": (nested, "inner/*/kernel[::2]", [(5,), (3,)]),
    "shared layer": (shared, "shared/*[:3]", [(5,), (3,)]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_trains_like_plain_keras(kind):
    make, what, shapes = MODELS[kind]
    x, y = data(*shapes)
    results = []
    for tuned in (False, True):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = make()
        model(x)
        before = values(model)
        selection = ft.select(model, what)
        if tuned:
            with ft.tune(model, selection) as tuning:
                model.compile(keras.optimizers.SGD(0.1), "mse")
                model.train_on_batch(x, y)
            assert tuning.verify()
            assert moved_outside(before, values(model), selection) == {}
        else:
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.train_on_batch(x, y)
        results.append(values(model))
    for path, region in selection.items():
        plain, trained = (region.gather(result[path]) for result in results)
        np.testing.assert_allclose(trained, plain, rtol=1e-5, atol=1e-6)
        assert moved_inside(before, results[1], selection)[path] > 0


def test_tied_weights_are_one_variable_with_the_gradient_of_both_uses():
    """Trap: a table used for look-up and for output. Plain Keras gives the full gradient, both uses summed."""
    tokens = np.random.default_rng(0).integers(0, 11, (6, 5))
    targets = np.roll(tokens, -1, axis=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    after = []
    for tuned in (False, True):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = Tied()
        model(tokens)
        before = values(model)
        tuning = ft.tune(model, "table/embeddings[[1, 4, 10]]") if tuned else None
        model.compile(keras.optimizers.SGD(1.0), loss)
        model.train_on_batch(tokens, targets)
        if tuning:
            tuning.finish()
            assert tuning.verify()
        after.append(values(model)["table/embeddings"])
    np.testing.assert_allclose(after[1][[1, 4, 10]], after[0][[1, 4, 10]], rtol=1e-5, atol=1e-6)
    assert not np.allclose(after[1][[1, 4, 10]], before["table/embeddings"][[1, 4, 10]])


def test_a_model_whose_loss_never_calls_it():
    x, y = data((5,), (3,))
    model = TwoHalves()
    before = values(model)
    part = ft.select(model, "encoder/code/kernel[0]", "decoder/back/kernel[:, 2]", "temperature[0]")
    with ft.tune(model, part) as tuning:
        model.compile(keras.optimizers.AdamW(0.1))
        model.fit(x, y, epochs=2, verbose=0)
    moved = moved_inside(before, values(model), tuning.selection)
    assert moved_outside(before, values(model), tuning.selection) == {}
    assert moved == {path: region.size for path, region in tuning.selection.items()}


def test_several_inputs_and_outputs():
    a, b, y, z = data((5,), (2,), (3,), (1,))
    model = two_outputs()
    before = values(model)
    with ft.tune(model, "*/kernel[3:]") as tuning:
        model.compile("adam", "mse")
        model.fit({"a": a, "b": b}, {"y": y, "z": z}, verbose=0)
    assert moved_outside(before, values(model), tuning.selection) == {}
    assert sum(moved_inside(before, values(model), tuning.selection).values()) == tuning.selection.size


def test_a_frozen_model_trains_what_is_selected():
    """The usual start of fine-tuning: everything is frozen, then a part is wanted after all."""
    x, y = data((5,), (3,))
    model = dense_model()
    model.trainable = False
    with ft.tune(model, "in/kernel[0]") as tuning:
        model.compile("adam", "mse")
        model.fit(x, y, verbose=0)
    assert tuning.verify()
    assert tuning.patch["in/kernel"].moved == 6
    assert not any(layer.trainable for layer in model.layers) and not model.trainable_variables


# Statistics.


def test_frozen_statistics_keep_their_bits_and_are_used():
    x, y = data((5,), (3,))
    model = with_norm()
    before = values(model)
    with ft.tune(model, ft.select(model, "bn/gamma[:2]", "in/kernel[:, 0]")) as tuning:
        model.compile("adam", "mse")
        model.fit(5 * x + 3, y, epochs=2, verbose=0)
    assert moved_outside(before, values(model), tuning.selection) == {}
    assert tuning.verify() and tuning.moving == ()


def test_updated_statistics_are_those_of_trained_layers_only():
    x, y = data((5,), (3,))
    model = with_norm()
    before = values(model)
    with ft.tune(model, "bn/gamma[:2]", statistics="update") as tuning:
        model.compile("adam", "mse")
        model.fit(5 * x + 3, y, epochs=2, verbose=0)
    after = values(model)
    assert tuning.moving == ("bn/moving_mean", "bn/moving_variance")
    assert all((before[path] != after[path]).all() for path in tuning.moving)
    assert moved_outside(before, after, tuning.selection, free=tuning.moving) == {}
    assert tuning.verify()
    assert "bn/moving_mean" in str(tuning)


def test_moved_statistics_are_in_the_patch_and_are_reverted():
    x, y = data((5,), (3,))
    model = with_norm()
    copy = copy_of(model)
    before = values(model)
    with ft.tune(model, "bn/gamma[:2]", statistics="update") as tuning:
        model.compile("adam", "mse")
        model.fit(5 * x + 3, y, verbose=0)
    tuning.patch.apply(copy)
    assert ft.diff(model, copy).size == 0
    tuning.revert()
    assert all((before[path] == value).all() for path, value in values(model).items())
    again = ft.tune(model, "bn/gamma[:2]", statistics="update")
    model.compile("adam", "mse")
    model.fit(5 * x + 3, y, verbose=0)
    again.revert()
    assert all((before[path] == value).all() for path, value in values(model).items())


def test_a_custom_layer_cannot_move_its_own_frozen_statistics():
    class Counting(L.Layer):
        def build(self, shape):
            self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="gain")
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

        def call(self, x):
            self.seen.assign(self.seen + 1.0)
            return x * self.gain

    x, y = data((5,), (5,))
    for statistics, count in (("frozen", 0), ("update", 3)):
        model = keras.Sequential([keras.Input((5,)), Counting(name="c")])
        with ft.tune(model, "c/gain[:2]", statistics=statistics):
            model.compile("sgd", "mse")
            for _ in range(3):
                model.train_on_batch(x, y)
        assert keras.ops.convert_to_numpy(model.get_layer("c").seen) == count


# Precision.


POLICIES = ["float32", "bfloat16", "float16", "mixed_bfloat16", "mixed_float16"]
if keras.backend.backend() != "jax":  # which has no float64 unless told so for the whole process
    POLICIES.append("float64")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_dtype_policy(policy):
    x, y = data((5,), (3,))
    keras.config.set_dtype_policy(policy)
    try:
        model = with_norm()
    finally:
        keras.config.set_dtype_policy("float32")
    for weight in model.weights:
        value = np.array(keras.ops.convert_to_numpy(weight))
        value.reshape(-1)[-1] = -0.0
        value.reshape(-1)[1] = np.finfo("float16").smallest_subnormal
        weight.assign(value)
    before = values(model)
    part = ft.select(model, "*/kernel[:, :2]", "bn/gamma[0]", ("out/bias", [True, False, True]))
    with ft.tune(model, part) as tuning:
        model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=4), "mse")
        model.fit(x, y, batch_size=4, epochs=4, verbose=0)
    after = values(model)
    assert moved_outside(before, after, tuning.selection) == {}
    assert tuning.verify()
    assert sum(moved_inside(before, after, tuning.selection).values()) > tuning.selection.size / 2


def test_small_steps_are_not_swallowed_by_a_low_precision_base():
    """Trap: 3e-6 from 1.0 is nothing in bfloat16. The part is float32, so a thousand of them add up."""
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, name="d", dtype="bfloat16")])
    model.get_layer("d").kernel.assign(np.ones((4, 3)))
    with ft.tune(model, "d/kernel[0]") as tuning:
        model.compile(keras.optimizers.SGD(1e-5), lambda y, p: keras.ops.mean(keras.ops.sum(p, axis=-1)))
        model.fit(np.ones((1000, 4)), np.ones((1000, 3)), batch_size=1, verbose=0)
        (part,) = [v for v in model.trainable_variables]
        assert keras.backend.standardize_dtype(part.dtype) == "float32"
        np.testing.assert_allclose(keras.ops.convert_to_numpy(part), 0.99, rtol=1e-4)
    assert (tuning.patch["d/kernel"].new.astype("float32") < 1.0).all()


def test_a_gradient_of_nan_outside_does_not_reach_the_part():
    """Trap: NaN times a zero mask is NaN. sqrt has an infinite slope at 0, where only a frozen element is."""

    class Root(L.Layer):
        def build(self, shape):
            self.w = self.add_weight(shape=(shape[-1],), initializer="ones", name="w")

        def call(self, x):
            return x * keras.ops.sqrt(self.w)

    model = keras.Sequential([keras.Input((4,)), Root(name="root")])
    model.layers[-1].w.assign([0.0, 1.0, 2.0, 3.0])
    x = np.zeros((2, 4), "float32")
    x[:, 1:] = 1.0
    with ft.tune(model, "root/w[1:3]") as tuning:
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)), "mse")
        model.train_on_batch(x, np.zeros((2, 4)))
    new = tuning.patch["root/w"].new
    assert np.isfinite(new).all() and tuning.patch["root/w"].moved == 2 and tuning.verify()


# No trace.


@pytest.mark.parametrize(
    ("make", "way"),
    cases(
        [with_norm, nested, Subclassed],
        ["finish", "revert", "with", "exception", "interrupt"],
        quick=lambda make, way: make is with_norm or way == "finish",
    ),
)
def test_no_trace_is_left(make, way):
    x, y = data((5,), (3,))
    model = make()
    model(x)
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)
    model.predict(x, verbose=0)
    model.compile("sgd", "mse")
    before, weights = state_of(model), values(model)
    tuning = ft.tune(model, "**/kernel[:2]")
    model.fit(x, y, verbose=0)
    if way in ("finish", "revert"):
        getattr(tuning, way)()
    elif way == "with":
        with tuning:
            pass
    else:
        error = {"exception": RuntimeError, "interrupt": KeyboardInterrupt}[way]
        with pytest.raises(error), tuning:
            raise error
    after = state_of(model)
    assert after == before
    assert not tuning.active
    moved = moved_inside(weights, values(model), tuning.selection)
    assert all(count == 0 for count in moved.values()) if way == "revert" else any(moved.values())
    assert moved_outside(weights, values(model), tuning.selection) == {}


def test_an_interrupt_during_fit_keeps_what_was_trained():
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    x, y = data((5,), (3,))
    model = dense_model()
    before = values(model)
    with pytest.raises(KeyboardInterrupt), ft.tune(model, "in/kernel[0]") as tuning:
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[Interrupt()])
    assert moved_inside(before, values(model), tuning.selection) == {"in/kernel": 6}
    assert tuning.verify()
    assert len(model.trainable_variables) == 4


def test_a_tuned_model_can_be_freed():
    model = dense_model()
    with ft.tune(model, "in/kernel[0]") as tuning:
        part = weakref.ref(model.trainable_variables[0])
        assert part().name == "kernel_part"
    del tuning
    gc.collect()
    assert part() is None


def test_a_tuning_that_nobody_holds_goes_on():
    """Without a name for what `tune` returns, the model must not fall back to training everything."""
    x, y = data((5,), (3,))
    model = dense_model()
    before = values(model)
    ft.tune(model, "in/kernel[0]")
    gc.collect()
    model.compile("adam", "mse")
    model.fit(x, y, verbose=0)
    selection = ft.select(model, "in/kernel[0]")
    assert moved_outside(before, values(model), selection) == {}
    assert moved_inside(before, values(model), selection) == {"in/kernel": 6}


def test_python_ends_quietly_while_a_model_is_being_tuned():
    program = """
import keras, finetooth as ft
model = keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(3, name="d")])
ft.tune(model, "d/kernel[0]")
print(len(model.trainable_variables))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "1")
    assert "Exception" not in done.stderr and "Traceback" not in done.stderr


def test_tuning_twice_in_a_row_and_a_copy():
    x, y = data((5,), (3,))
    model = dense_model()
    copy = copy_of(model)
    before = values(model)
    for what in ("in/kernel[0]", "out/kernel[:, 1]"):
        with ft.tune(model, what) as tuning:
            model.compile("adam", "mse")
            model.fit(x, y, verbose=0)
        assert tuning.verify()
    with ft.tune(copy, "in/kernel[0]"):
        copy.compile("adam", "mse")
        copy.fit(x, y, verbose=0)
    np.testing.assert_array_equal(values(copy)["in/kernel"], values(model)["in/kernel"])
    both = ft.select(model, "in/kernel[0]", "out/kernel[:, 1]")
    assert moved_outside(before, values(model), both) == {}


def test_verify_finds_what_somebody_else_changed():
    model = with_norm()
    with ft.tune(model, "in/kernel[:, 0]") as tuning:
        assert tuning.verify().changed == {}
        kernel = model.get_layer("in").kernel
        value = np.array(keras.ops.convert_to_numpy(kernel))
        value[1, 1] = np.nextafter(value[1, 1], 1, dtype="float32")
        value[2, 0] = 7.0
        kernel.assign(value)
        model.get_layer("bn").moving_mean.assign(np.ones(6))
        report = tuning.verify()
        assert not report and report.changed == {"in/kernel": 1, "bn/moving_mean": 6}
        assert "in/kernel: 1 elements" in str(report)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(kernel), value)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(kernel), value)
    assert tuning.patch["in/kernel"].new[2, 0] == 7.0


def test_reading_anything_while_tuned_sees_the_merged_weights():
    x, y = data((5,), (3,))
    model = dense_model()
    with ft.tune(model, "in/kernel[:, 1:3]") as tuning:
        model.compile("adam", "mse")
        model.fit(x, y, verbose=0)
        inside = values(model), model.get_weights(), model.predict(x, verbose=0), model.evaluate(x, y, verbose=0)
        kernel = model.get_layer("in").kernel
        merged = kernel + 0.0, kernel.numpy(), kernel[1:3]
        patch = tuning.patch
    after = values(model)
    for path in after:
        np.testing.assert_array_equal(inside[0][path], after[path])
    for a, b in zip(inside[1], model.get_weights()):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(inside[2], model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(inside[3], model.evaluate(x, y, verbose=0), rtol=1e-5)
    for a, b in zip(merged, (after["in/kernel"], after["in/kernel"], after["in/kernel"][1:3])):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(a), b)
    np.testing.assert_array_equal(patch["in/kernel"].new, tuning.patch["in/kernel"].new)


def test_a_patch_taken_during_training_does_not_change_afterwards():
    x, y = data((5,), (3,))
    model = dense_model()
    with ft.tune(model, ft.select(model, "in/kernel[:, 1:3]", "out/*")) as tuning:
        model.compile("adam", "mse")
        model.fit(x, y, verbose=0)
        patch = tuning.patch
        kept = {path: np.array(change.new) for path, change in patch.items()}
        model.fit(x, y, verbose=0)
    for path, change in patch.items():
        np.testing.assert_array_equal(change.new, kept[path])
        assert (tuning.patch[path].new != kept[path]).any()


def test_weights_can_be_set_while_tuned():
    model = dense_model()
    new = [weight + 1.0 for weight in model.get_weights()]
    with ft.tune(model, "in/kernel[:, 1:3]"):
        model.set_weights(new)
        for a, b in zip(model.get_weights(), new):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(model.get_weights(), new):
        np.testing.assert_array_equal(a, b)


def test_custom_loops_over_inner_models_find_their_parts():
    """Like a GAN: gradients for the trainable weights of one inner model at a time."""
    model = nested()
    with ft.tune(model, ft.select(model, "inner/a/kernel[0]", "out/kernel[0]")):
        inner = model.get_layer("inner")
        assert [v.path for v in inner.trainable_variables] == ["inner/a/kernel_part"]
        assert len(model.trainable_variables) == 2


# Errors.


def test_errors_say_what_to_do():
    x, y = data((5,), (3,))
    model = dense_model()
    with pytest.raises(ft.TuningError, match="keras.Model"):
        ft.tune(L.Dense(3), "**")
    with pytest.raises(ft.TuningError, match="statistics"):
        ft.tune(model, "**", statistics="no")
    with pytest.raises(ft.TuningError, match="layer_rules"):
        ft.tune(model, "**", layer_rules="composed")
    with pytest.raises(ft.SelectionError, match="Build it first"):
        ft.tune(keras.Sequential([L.Dense(3)]), "**")
    tuning = ft.tune(model, "in/kernel[0]")
    with pytest.raises(ft.TuningError, match="finish"):
        ft.tune(model, "out/kernel[0]")
    outer = keras.Sequential([keras.Input((5,)), model])
    with pytest.raises(ft.TuningError, match="finish"):
        ft.tune(outer, "**")
    tuning.revert()
    model.compile("adam", "mse")
    model.fit(x, y, verbose=0)
    before = values(model)
    with ft.tune(model, "in/kernel[0]") as tuning:
        for train in (model.fit, model.train_on_batch):
            with pytest.raises(ft.TuningError, match="model.compile"):
                train(x, y)
        model.compile("adam", "mse")
        model.fit(x, y, verbose=0)
    assert moved_outside(before, values(model), tuning.selection) == {}
    assert isinstance(ft.TuningError("x"), ValueError)


def test_tuning_leaves_the_model_alone_when_it_cannot_begin(monkeypatch):
    """A failure half-way undoes what was done."""
    model = dense_model()
    before = state_of(model)

    def fail(*_):
        raise RuntimeError("half-way")

    monkeypatch.setattr("finetooth.tuning.attach._calls_planned", fail)
    with pytest.raises(RuntimeError, match="half-way"):
        ft.tune(model, "in/kernel[0]")
    assert state_of(model) == before
    assert [v.path for v in weights_by_path(model).values()] == ["in/kernel", "in/bias", "out/kernel", "out/bias"]


def test_several_items_are_trained_together():
    model = with_norm()
    mask = np.eye(6, 3, dtype=bool)
    items = ["in/*[:2]", model.get_layer("bn2"), (model.get_layer("out").kernel, mask), ft.select(model, "mid/bias")]
    expected = ft.select(model, *items)
    with ft.tune(model, *items) as tuning:
        assert tuning.selection == expected
        assert [row[0] for row in tuning.table().rows] == list(expected)
        assert "in/kernel" in str(tuning) and f"{expected.size:,} elements" in repr(tuning)


def test_verify_names_weights_that_a_renamed_layer_has_taken_along():
    model = dense_model()
    with ft.tune(model, "in/kernel[0]") as tuning:
        model.get_layer("out").name = "other"
        with pytest.raises(ft.TuningError, match=r"out/kernel.*other/kernel.*renamed"):
            tuning.verify()
        model.get_layer("other").name = "out"
        assert tuning.verify()
