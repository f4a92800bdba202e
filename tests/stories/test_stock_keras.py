"""Stock Keras around a tuned model: callbacks, saving, loading, execution options."""

import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers import cases, moved_inside, moved_outside, values

import finetooth as ft

L = keras.layers
PART = "**/*kernel[:2]"


def network():
    inputs = keras.Input((6, 4))
    x = L.LSTM(5, name="rnn")(inputs)
    x = L.BatchNormalization(name="bn")(x)
    return keras.Model(inputs, L.Dense(3, name="out")(x))


def data(n=24, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 6, 4)).astype("float32"), rng.normal(size=(n, 3)).astype("float32")


def compiled(model, optimizer=None, **options):
    model.compile(optimizer or keras.optimizers.Adam(0.05), "mse", **options)


@pytest.mark.parametrize("when", ["before", "after"])
def test_compile_before_or_after_tune(when):
    model, (x, y) = network(), data()
    before = values(model)
    if when == "before":
        compiled(model)
    with ft.tune(model, PART) as tuning:
        if when == "after":
            compiled(model)
        model.fit(x, y, verbose=0)
    assert moved_outside(before, values(model), tuning.selection) == {}
    assert sum(moved_inside(before, values(model), tuning.selection).values()) == tuning.selection.size


class Steps(L.Layer):
    """Counts how often Python runs its call: once per trace, or once per step where nothing is traced."""

    ran = 0

    def call(self, x):
        type(self).ran += 1
        return x


def test_one_trace_serves_all_steps():
    inputs = keras.Input((6, 4))
    model = keras.Model(inputs, L.Dense(3, name="out")(L.LSTM(5, name="rnn")(Steps()(inputs))))
    x, y = data(40)
    with ft.tune(model, PART):
        compiled(model)
        model.fit(x[:4], y[:4], batch_size=4, verbose=0)
        after_one = Steps.ran
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    steps = 20 if keras.backend.backend() == "torch" else 0  # torch runs Python at each step, and traces nothing
    assert Steps.ran - after_one == steps


@pytest.mark.parametrize("steps", [1, 3] if keras.backend.backend() != "torch" else [1])
def test_steps_per_execution(steps):
    """Keras has steps_per_execution on TensorFlow and JAX only."""
    model, (x, y) = network(), data()
    before = values(model)
    with ft.tune(model, PART) as tuning:
        compiled(model, steps_per_execution=steps)
        model.fit(x, y, batch_size=2, verbose=0)
    assert tuning.verify()
    assert sum(moved_inside(before, values(model), tuning.selection).values()) == tuning.selection.size


def test_early_stopping_restores_the_best_weights():
    model, (x, y) = network(), data()

    class Remember(keras.callbacks.Callback):
        weights: list = []

        def on_epoch_end(self, epoch, logs=None):
            self.weights.append(self.model.get_weights())

    stopping = keras.callbacks.EarlyStopping(monitor="loss", mode="max", patience=2, restore_best_weights=True)
    with ft.tune(model, PART) as tuning:
        compiled(model)
        # The loss falls, and mode="max" calls that worse: the best weights are those of the first epoch.
        model.fit(x, y, epochs=5, verbose=0, callbacks=[Remember(), stopping])
    assert len(Remember.weights) == 3
    for kept, first in zip(model.get_weights(), Remember.weights[0]):
        np.testing.assert_array_equal(kept, first)
    assert tuning.verify()


def test_swap_ema_weights():
    """What the callback swaps in are the averages of the part, and frozen weights stay what they are."""
    x, y = data()

    def tuned():
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = network()
        before, tuning = values(model), ft.tune(model, PART)
        compiled(model, keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.75))
        return model, before, tuning

    model, before, tuning = tuned()
    average = None
    for start in (0, 8, 16):
        model.train_on_batch(x[start : start + 8], y[start : start + 8])
        now = values(model)
        average = {p: now[p] if average is None else 0.75 * average[p] + 0.25 * now[p] for p in now}
    tuning.finish()
    assert max(np.abs(average[path] - now[path]).max() for path in now) > 0.01

    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(values(self.model))

    model, before, tuning = tuned()
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[swap, Look()])
    tuning.finish()
    assert len(seen) == 1
    for after in (*seen, values(model)):
        assert moved_outside(before, after, tuning.selection) == {}
        for path in after:
            np.testing.assert_allclose(after[path], average[path], rtol=1e-5, atol=1e-6, err_msg=path)


def test_learning_rate_and_nan_callbacks():
    model, (x, y) = network(), data()
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=0, min_delta=100.0)
    with ft.tune(model, PART) as tuning:
        compiled(model)
        history = model.fit(x, y, epochs=3, verbose=0, callbacks=[plateau, keras.callbacks.TerminateOnNaN()])
        assert history.history["learning_rate"] == pytest.approx([0.05, 0.05, 0.025])
        nan = np.full_like(y, np.nan)
        stopped = model.fit(x, nan, epochs=3, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
        assert len(stopped.history["loss"]) == 1
    assert tuning.verify()


def test_summary_lists_the_parts_as_trainable(capsys):
    model = network()
    with ft.tune(model, PART) as tuning:
        lines = []
        model.summary(print_fn=lines.append)
    assert f"Trainable params: {tuning.selection.size:,} " in "\n".join(lines)


LOAD = """
import sys
sys.modules["finetooth"] = None  # importing it would fail
import keras, numpy as np
path, weights, x, expected = sys.argv[1:]
if path != "-":
    model = keras.saving.load_model(path)
else:
    keras.utils.set_random_seed(7)
    inputs = keras.Input((6, 4))
    h = keras.layers.BatchNormalization(name="bn")(keras.layers.LSTM(5, name="rnn")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(3, name="out")(h))
    model.load_weights(weights)
assert len(model.trainable_variables) == 7, model.trainable_variables
np.testing.assert_allclose(model.predict(np.load(x), verbose=0), np.load(expected), rtol=1e-5, atol=1e-6)
model.compile("adam", "mse")
model.fit(np.load(x), np.load(expected), verbose=0)
print("loaded")
"""


@pytest.mark.parametrize("how", cases(["save", "save_weights", "checkpoint"], quick=lambda how: how != "checkpoint"))
def test_files_written_while_tuned_load_without_finetooth(how, tmp_path):
    model, (x, y) = network(), data()
    path, weights = tmp_path / "model.keras", tmp_path / "model.weights.h5"
    callbacks = [keras.callbacks.ModelCheckpoint(path)] if how == "checkpoint" else []
    with ft.tune(model, PART):
        compiled(model)
        model.fit(x, y, verbose=0, callbacks=callbacks)
        if how == "save":
            model.save(path)
        elif how == "save_weights":
            model.save_weights(weights)
        expected = model.predict(x, verbose=0)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", expected)
    model_file = "-" if how == "save_weights" else path
    arguments = [str(name) for name in (model_file, weights, tmp_path / "x.npy", tmp_path / "y.npy")]
    done = subprocess.run([sys.executable, "-c", LOAD, *arguments], capture_output=True, text=True)
    assert done.stdout.strip().endswith("loaded"), done.stderr


def test_weights_loaded_while_tuned_reach_the_parts(tmp_path):
    model, (x, y) = network(), data()
    other = network()
    other.compile("sgd", "mse")
    other.fit(x, y, verbose=0)
    renamed = {v.path: w for v, w in zip(model.weights, other.get_weights())}
    path = tmp_path / "other.weights.h5"
    other.save_weights(path)
    with ft.tune(model, PART) as tuning:
        model.load_weights(path)
        for variable in (v for v in model.weights if v.path in renamed):
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), renamed[variable.path])
    for variable in model.weights:
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), renamed[variable.path])
    assert not tuning.verify()  # somebody loaded other weights: that is what it should say


def test_a_failing_step_loses_nothing():
    """JAX's trainer takes the weights out of the model for a step; a step that fails must give them back."""
    model, (x, y) = network(), data()
    before = values(model)

    def broken(y_true, y_pred):
        raise RuntimeError("broken loss")

    with pytest.raises(RuntimeError, match="broken"), ft.tune(model, PART) as tuning:
        model.compile("adam", broken)
        model.fit(x, y, verbose=0)
    assert all((before[path] == value).all() for path, value in values(model).items())
    assert tuning.verify()


def test_patch_and_verify_from_a_callback():
    model, (x, y) = network(), data()
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((sum(change.moved for _, change in tuning.patch.items()), bool(tuning.verify())))

    with ft.tune(model, PART) as tuning:
        compiled(model)
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[Look()])
    assert seen == [(tuning.selection.size, True)] * 3


def test_evaluating_and_predicting_while_tuned_changes_nothing():
    model, (x, y) = network(), data()
    before = values(model)
    with ft.tune(model, PART) as tuning:
        compiled(model, metrics=["mae"])
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
        model.test_on_batch(x, y)
        model.predict_on_batch(x)
        model(x)
    assert all((before[path] == value).all() for path, value in values(model).items())
    assert tuning.patch.size and not any(change.moved for _, change in tuning.patch.items())


def test_train_on_batch_equals_fit():
    x, y = data(8)
    results = []
    for by_batch in (True, False):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = network()
        with ft.tune(model, PART):
            compiled(model)
            if by_batch:
                for start in (0, 4):
                    model.train_on_batch(x[start : start + 4], y[start : start + 4])
            else:
                model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        results.append(values(model))
    for path in results[0]:
        np.testing.assert_allclose(results[0][path], results[1][path], rtol=1e-6, atol=1e-7)


def test_a_model_saved_after_finish_loads(tmp_path):
    """The optimizer that is left over holds the state of parts, which no plain model could load."""
    model = keras.Sequential([keras.Input((4,)), L.Dense(2, name="a")])
    with ft.tune(model, ft.select(model, "a/kernel[:1]", "a/bias")):
        model.compile("adam", "mse")
        model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)
    model.save(tmp_path / "m.keras")
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert ft.diff(model, loaded).size == 0


def test_models_that_share_layers_are_traced_anew():
    """A feature extractor that has run before sees the merged weights, and the old ones again after revert."""
    inputs = keras.Input((4,))
    features = L.Dense(3, name="a")(inputs)
    whole, extractor = keras.Model(inputs, L.Dense(2, name="h")(features)), keras.Model(inputs, features)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    before = extractor.predict(x, verbose=0)
    tuning = ft.tune(whole, "a/kernel[:1]")
    whole.compile(keras.optimizers.SGD(0.5), "mse")
    whole.fit(x, np.ones((8, 2)), verbose=0)
    during = extractor.predict(x, verbose=0)
    np.testing.assert_allclose(during, keras.ops.convert_to_numpy(extractor(x)), rtol=1e-6)
    assert not np.allclose(during, before)
    tuning.revert()
    np.testing.assert_allclose(extractor.predict(x, verbose=0), before, rtol=1e-6)


def test_an_outer_model_trained_before_cannot_move_what_is_frozen():
    inner = keras.Sequential([keras.Input((4,)), L.Dense(3, name="a")], name="inner")
    outer = keras.Sequential([keras.Input((4,)), inner, L.Dense(2, name="h")])
    x, y = np.ones((8, 4)), np.ones((8, 2))
    outer.compile(keras.optimizers.SGD(0.1), "mse")
    outer.fit(x, y, verbose=0)
    with ft.tune(inner, "a/kernel[:1]") as tuning:
        if keras.backend.backend() != "jax":  # whose trainer loses the weights of a model it refuses to train
            with pytest.raises(ValueError):
                outer.fit(x, y, verbose=0)
        outer.compile(keras.optimizers.SGD(0.1), "mse")
        outer.fit(x, y, verbose=0)
        assert tuning.verify() and tuning.patch["a/kernel"].moved == 3


if keras.backend.backend() != "tensorflow":  # where Keras cannot train such a model, tuned or not

    @pytest.mark.parametrize("layer_rules", [True, False])
    def test_rematerialised_layers_train(layer_rules):
        with keras.RematScope("full"):
            model = keras.Sequential([keras.Input((4,)), L.Dense(3, "tanh", name="d"), L.Dense(2)])
        rng = np.random.default_rng(0)
        x = rng.normal(size=(16, 4)).astype("float32")
        with ft.tune(model, "d/kernel[:, 1:2]", layer_rules=layer_rules) as tuning:
            model(x)
            model.compile("adam", "mse")
            model.fit(x, rng.normal(size=(16, 2)), verbose=0)
            inside = model.predict(x, verbose=0)
        assert tuning.patch["d/kernel"].moved == 4
        np.testing.assert_allclose(model.predict(x, verbose=0), inside, rtol=1e-5, atol=1e-6)


def test_stateless_call_uses_the_values_it_is_given():
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, name="a")])
    x = np.ones((2, 4), "float32")
    with ft.tune(model, "a/kernel[:1]"):
        frozen = [v.value for v in model.non_trainable_variables]
        outputs, _ = model.stateless_call([v.value * 0 for v in model.trainable_variables], frozen, x)
    kernel = np.array(values(model)["a/kernel"])
    kernel[:1] = 0
    np.testing.assert_allclose(keras.ops.convert_to_numpy(outputs), x @ kernel, rtol=1e-5, atol=1e-6)
