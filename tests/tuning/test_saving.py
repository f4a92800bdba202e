"""Every way to save a model that is being tuned writes a file of the plain model, which loads without finetooth."""

import copy
import pickle

import keras
import numpy as np
import pytest
from keras import layers, ops

import finetooth as ft
from finetooth.keras_internals import private as keras_private

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")
SKIPPED = pytest.mark.filterwarnings(
    "ignore:Skipping variable loading for optimizer"
)  # Keras: it holds other variables
PART = ["**/wide/kernel[:, :2]", "**/wide/bias", "top/kernel[[0, 2], 1:]"]  # a part, a whole weight, another part


def network():
    """A model with an inner one, a frozen layer, statistics, and another model that shares a layer with it."""
    inner = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, "relu", name="wide"), layers.BatchNormalization(name="norm")], name="inner"
    )
    frozen = layers.Dense(4, name="frozen", trainable=False)
    outer = keras.Sequential([keras.Input((6,)), inner, frozen, layers.Dense(3, name="top")], name="outer")
    sharing = keras.Sequential([keras.Input((6,)), inner.layers[0], layers.Dense(2)], name="sharing")
    return {"outer": outer, "inner": inner, "sharing": sharing}


def trained_part(outer, optimizer=None):
    tuning = ft.tune(outer, ft.select(outer, *PART))
    outer.compile(optimizer or keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
    outer.fit(X, Y, shuffle=False, verbose=0)
    return tuning


def weights_of(model):
    """The merged weights, of any model that holds a tuned layer."""
    return [np.array(ops.convert_to_numpy(v)) for v in model.weights if not v.name.endswith("_part")]


def assert_same_weights(loaded, model):
    one, other = weights_of(loaded), weights_of(model)
    assert len(one) == len(other) > 0
    for a, b in zip(one, other):
        np.testing.assert_array_equal(a, b)


@SKIPPED
@pytest.mark.parametrize("which", ["outer", "inner", "sharing", "made while tuned"])
@pytest.mark.parametrize("name", ["m.h5", "m.keras", "m.weights.h5"])
def test_a_file_of_any_model_with_a_tuned_layer_is_that_of_the_plain_model(which, name, tmp_path):
    models = network()
    tuning = trained_part(models["outer"])
    models["made while tuned"] = keras.Sequential([keras.Input((6,)), *models["inner"].layers, layers.Dense(2)])
    model, fresh = models[which], None
    ways = [keras.Model.save, keras.saving.save_model]
    for way in [keras.Model.save_weights] if "weights" in name else ways:
        way(model, tmp_path / name)
        if "weights" in name:
            fresh = keras.models.clone_model(model)
            fresh.load_weights(tmp_path / name)
        else:
            fresh = keras.saving.load_model(tmp_path / name, compile=False)
        assert_same_weights(fresh, model)
    during = [len(model.trainable_variables), len(model.weights)]
    tuning.finish()
    assert_same_weights(fresh, model)
    if "weights" not in name:
        assert [v.trainable for v in fresh.weights] == [v.trainable for v in model.weights]
        np.testing.assert_allclose(fresh.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5)
    assert during != [len(model.trainable_variables), len(model.weights)]


def test_tuning_goes_on_after_saving(tmp_path):
    one, other = network()["outer"], network()["outer"]
    other.set_weights(one.get_weights())
    tunings = [trained_part(one), trained_part(other)]
    one.save(tmp_path / "m.h5")
    for model in (one, other):
        model.fit(X, Y, epochs=2, shuffle=False, verbose=0)
    assert [len(v) for v in (one.weights, one.trainable_weights)] == [
        len(v) for v in (other.weights, other.trainable_weights)
    ]
    for tuning in tunings:
        assert tuning.verify()
        tuning.finish()
    assert_same_weights(one, other)


@pytest.mark.parametrize("options", [{}, {"by_name": True}, {"skip_mismatch": True}], ids=str)
@pytest.mark.parametrize("when", ["plain", "tuned"])
def test_weights_of_a_legacy_file_are_loaded_while_tuned(options, when, tmp_path):
    source, model = network()["outer"], network()["outer"]
    if when == "plain":
        source.save(tmp_path / "m.h5")
    else:
        with trained_part(source):
            source.save(tmp_path / "m.h5")
    if options.get("skip_mismatch"):
        options = {**options, "by_name": True}
    tuning = trained_part(model)
    model.load_weights(tmp_path / "m.h5", **options)
    assert_same_weights(model, source)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(X, Y, verbose=0)
    moved = {
        v.path.split("/", 1)[1]
        for v, a, b in zip(source.weights, weights_of(model), weights_of(source))
        if (a != b).any()
    }
    assert moved == {"wide/kernel", "wide/bias", "top/kernel"}
    tuning.finish()


def test_two_tuned_models_in_one_file_and_no_trace_afterwards(tmp_path):
    modules = keras_private.saving_modules()
    before = [dict(vars(module)) for module in modules]
    models = [keras.Sequential([keras.Input((6,)), layers.Dense(6, name=name)]) for name in ("one", "two")]
    both = keras.Sequential([keras.Input((6,)), *models[0].layers, *models[1].layers])
    tunings = [ft.tune(models[0], "one/kernel[:2]"), ft.tune(models[1], "two/kernel[0, 0]", "two/bias")]

    def save_and_load():
        both.save(tmp_path / "m.h5")
        assert_same_weights(keras.saving.load_model(tmp_path / "m.h5", compile=False), both)

    save_and_load()
    with pytest.raises(ValueError, match="extension"):
        both.save(tmp_path / "m.unknown")
    tunings[0].finish()
    save_and_load()
    tunings[1].revert()
    save_and_load()
    assert [dict(vars(module)) == names for module, names in zip(modules, before)] == [True, True]


@SKIPPED
def test_copies_of_a_tuned_model_are_plain():
    model = network()["outer"]
    tuning = trained_part(model)
    for made in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert_same_weights(made, model)
        assert all(type(one) is type(other) for one, other in zip(made.weights, network()["outer"].weights))
    tuning.finish()


def assert_same_state(saved, loaded):
    assert len(saved.variables) == len(loaded.variables) > 2
    for one, other in zip(saved.variables, loaded.variables):
        np.testing.assert_array_equal(ops.convert_to_numpy(one), ops.convert_to_numpy(other))
    assert int(saved.iterations) > 0


OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=4.0),
    "several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.1), {".*wide.*": keras.optimizers.SGD(0.1, 0.9)})
    ),
    "lazy": lambda: ft.LazyOptimizer(keras.optimizers.Adam(0.1)),
}


ONE_EACH = ["**/kernel[:, 0]", "**/bias[:1]", "**/gamma[:1]", "**/beta[:1]"]  # as many variables as a plain optimizer's


@SKIPPED
@pytest.mark.filterwarnings("ignore:The state of optimizer")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("part", [PART, ONE_EACH], ids=["some", "one for each weight"])
@pytest.mark.parametrize("name", ["m.keras", "m.h5"])
def test_a_file_of_a_model_whose_optimizer_trains_parts(kind, part, name, tmp_path):
    model = network()["outer"]
    tuning = ft.tune(model, *part)
    model.compile(OPTIMIZERS[kind](), keras.losses.MeanSquaredError(), run_eagerly=True)
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / name)
    loaded = keras.saving.load_model(tmp_path / name)
    assert_same_weights(loaded, model)
    loaded.fit(X, Y, verbose=0)
    state = [np.array(ops.convert_to_numpy(v)) for v in model.optimizer.variables]
    model.load_weights(tmp_path / name)
    for one, other in zip(model.optimizer.variables, state):
        np.testing.assert_array_equal(ops.convert_to_numpy(one), other)
    tuning.finish()
    model.save(tmp_path / "finished.keras")
    loaded = keras.saving.load_model(tmp_path / "finished.keras")
    assert_same_weights(loaded, model)
    loaded.fit(X, Y, verbose=0)
    loaded.save(tmp_path / "plain.keras")
    assert_same_state(loaded.optimizer, keras.saving.load_model(tmp_path / "plain.keras").optimizer)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_of_an_optimizer_without_parts_is_saved(kind, tmp_path):
    """A selection of whole weights trains what a plain model with the others frozen trains."""
    model = network()["outer"]
    model.get_layer("inner").trainable = False
    with ft.tune(model, "top/*"):
        model.compile(OPTIMIZERS[kind](), "mse", run_eagerly=True)
        model.fit(X, Y, epochs=2, verbose=0)
        model.save(tmp_path / "tuned.keras")
    assert_same_state(model.optimizer, keras.saving.load_model(tmp_path / "tuned.keras").optimizer)
    optimizer = model.optimizer
    model.fit(X, Y, verbose=0)
    assert model.optimizer is optimizer and "save_own_variables" not in vars(optimizer)
    model.save(tmp_path / "plain.keras")
    assert_same_state(model.optimizer, keras.saving.load_model(tmp_path / "plain.keras").optimizer)


def test_selecting_everything_keeps_the_state_of_the_optimizer(tmp_path):
    model = network()["inner"]
    model.add(layers.Dense(3))
    with ft.tune(model, "**"):
        model.compile("adam", "mse", run_eagerly=True)
        model.fit(X, Y, epochs=2, verbose=0)
        model.save(tmp_path / "tuned.keras")
    loaded = keras.saving.load_model(tmp_path / "tuned.keras")
    assert_same_state(model.optimizer, loaded.optimizer)
    for each in (model, loaded):
        each.fit(X, Y, shuffle=False, verbose=0)
    model.save(tmp_path / "plain.keras")
    assert_same_state(model.optimizer, keras.saving.load_model(tmp_path / "plain.keras").optimizer)


def test_the_state_for_some_whole_weights_does_not_disturb_a_model_that_trains_more(tmp_path):
    model = network()["outer"]
    with ft.tune(model, "top/*"):
        model.compile("adam", "mse", run_eagerly=True)
        model.fit(X, Y, verbose=0)
        model.save(tmp_path / "m.keras")
    with pytest.warns(UserWarning, match="because it has 14 variables whereas the saved optimizer has 6 variables"):
        loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert_same_weights(loaded, model)


@SKIPPED
@pytest.mark.parametrize("part", [PART, ONE_EACH], ids=["some", "one for each weight"])
def test_a_file_of_a_model_in_mixed_float16(part, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network()["outer"]
    finally:
        keras.config.set_dtype_policy("float32")
    with ft.tune(model, *part):
        model.compile("adam", "mse", run_eagerly=True)
        model.fit(X, Y, verbose=0)
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        model.save(tmp_path / "m.keras")
        assert_same_weights(keras.saving.load_model(tmp_path / "m.keras"), model)


@SKIPPED
def test_a_model_that_shares_a_layer_and_trains_it_while_it_is_tuned(tmp_path):
    models = network()
    with trained_part(models["outer"]):
        models["sharing"].compile("adam", "mse", run_eagerly=True)
        models["sharing"].fit(X, Y[:, :2], verbose=0)
        models["sharing"].save(tmp_path / "m.keras")
        assert_same_weights(keras.saving.load_model(tmp_path / "m.keras"), models["sharing"])
