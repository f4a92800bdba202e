"""The private names of Keras we rely on still are what we think they are."""

from contextlib import ExitStack

import keras

from finetooth.keras_internals import private as keras_private
from finetooth.keras_internals import scopes
from finetooth.keras_internals.hooks import hooked


def model():
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="a")], name="inner")
    norm = keras.layers.BatchNormalization(name="bn")
    return keras.Sequential([keras.Input((4,)), inner, norm])


def test_layers_are_listed_once_and_outer_ones_first():
    outer = model()
    layers = keras_private.layers_of(outer)
    names = [layer.name for layer in layers]
    assert layers[0] is outer and names.index("inner") < names.index("a") and len(set(names)) == len(names)


def test_inner_layers_are_the_direct_ones():
    outer = model()
    assert {layer.name for layer in keras_private.inner_layers(outer)} >= {"inner", "bn"}
    assert "a" not in {layer.name for layer in keras_private.inner_layers(outer)}


def test_own_variables_are_those_of_the_layer_alone():
    outer = model()
    norm = outer.get_layer("bn")
    assert keras_private.own_variables(outer) == []
    assert [v.name for v in keras_private.own_variables(norm)] == ["gamma", "beta", "moving_mean", "moving_variance"]


def test_a_frozen_weight_is_still_known_as_made_to_be_trained():
    norm = model().get_layer("bn")
    norm.trainable = False
    assert [v.name for v in keras_private.made_trainable(norm)] == ["gamma", "beta"]


def test_the_flag_of_one_layer_is_set_alone():
    outer = model()
    keras_private.set_trainable(outer, False)
    assert not outer.trainable and outer.get_layer("bn").trainable and outer.get_layer("bn").gamma.trainable


def test_track_and_untrack_are_inverse_on_a_built_layer():
    dense = model().get_layer("inner").get_layer("a")
    dense.trainable = False
    before = list(dense.weights), dense._tracker.locked
    extra = keras.Variable([1.0, 2.0], name="extra")
    keras_private.track(dense, extra)
    assert any(v is extra for v in dense.weights)
    assert extra.trainable and dense._tracker.locked == before[1]
    keras_private.untrack(dense, extra)
    assert [id(v) for v in dense.weights] == [id(v) for v in before[0]]


def test_raw_value_is_the_backend_value():
    variable = keras.Variable([1.0, 2.0])
    assert keras_private.raw_value(variable) is not None
    assert keras.ops.convert_to_numpy(keras_private.raw_value(variable)).tolist() == [1.0, 2.0]


def test_fit_on_jax_takes_and_returns_state_by_these_names(backend):
    assert all(hasattr(keras.Model, name) == (backend == "jax") for name in keras_private.JAX_STATE)


def test_a_layer_on_torch_lists_its_parameters_by_these_names(backend):
    layer = model().get_layer("bn")
    listed, track = keras_private.TORCH_PARAMETERS
    assert hasattr(layer, listed) == hasattr(layer, track) == (backend == "torch")


def test_an_optimizer_without_distribution_takes_variables_of_any_kind(backend):
    for kind in (keras.optimizers.Adam, keras.optimizers.Nadam):
        plain = keras_private.undistributed(kind)
        assert issubclass(plain, kind) and (plain is kind) == (backend != "tensorflow")
        optimizer = plain(0.1)
        variable = keras.Variable([1.0, 2.0])
        optimizer.apply([keras.ops.ones(2)], [variable])
        assert (keras.ops.convert_to_numpy(variable) < [1, 2]).all()


def test_weight_decay_leaves_out_what_another_optimizer_leaves_out():
    one, other = (keras_private.undistributed(keras.optimizers.AdamW)(0.1) for _ in range(2))
    mine = [keras.Variable([1.0], name=name) for name in "ab"]
    theirs = [keras.Variable([1.0], name=name) for name in "cd"]
    other.exclude_from_weight_decay(var_names=["d"])
    one.build(mine)
    other.build(theirs)
    keras_private.decay_like(one, other, dict(zip(map(id, mine), theirs)))
    one.apply([keras.ops.zeros(1)] * 2, mine)
    decayed, spared = (keras.ops.convert_to_numpy(v).tolist() for v in mine)
    assert decayed[0] < 1 and spared == [1.0]


def test_the_outermost_layer_of_a_call_is_known_and_a_bare_stateless_call_leaves_no_trace():
    seen = []

    class Asking(keras.layers.Layer):
        def call(self, x):
            seen.append(keras_private.entry_layer(self))
            return x

    layer = Asking()
    outer = keras.Sequential([keras.Input((2,)), layer])
    seen.clear()
    x = keras.ops.ones((1, 2))
    outer(x)
    layer(x)
    layer.stateless_call([], [], x)
    outer(x)
    assert seen == [outer, layer, layer, outer]


def test_the_current_value_is_that_of_the_scope_and_scopes_can_be_left():
    variable = keras.Variable([1.0, 2.0])
    with keras.StatelessScope([(variable, keras.ops.zeros(2))]):
        assert keras.ops.convert_to_numpy(scopes.current_value(variable)).tolist() == [0.0, 0.0]
        with scopes.outside_of_scopes():
            assert keras.ops.convert_to_numpy(variable).tolist() == [1.0, 2.0]
            assert keras.Variable(1.0).shape == ()
        assert keras.ops.convert_to_numpy(variable).tolist() == [0.0, 0.0]
    assert keras.ops.convert_to_numpy(scopes.current_value(variable)).tolist() == [1.0, 2.0]
    assert not scopes.in_stateless_scope()


def test_losses_that_a_layer_has_added_can_be_forgotten():
    layer = keras.layers.ActivityRegularization(l2=1.0)
    layer(keras.ops.ones((1, 2)))
    assert layer.losses
    keras_private.forget_losses(layer)
    assert not layer.losses


def test_an_optimizer_says_what_it_trains_and_averages():
    variables = [keras.Variable([1.0]), keras.Variable([2.0, 3.0])]
    for use_ema in (False, True):
        optimizer = keras.optimizers.SGD(0.0, use_ema=use_ema)
        optimizer.apply([keras.ops.zeros(1), keras.ops.zeros(2)], variables)
        assert [id(v) for v in keras_private.trained_by(optimizer)] == [id(v) for v in variables]
        averages = [keras.ops.convert_to_numpy(v).tolist() for v in keras_private.averages_of(optimizer)]
        assert averages == ([[1.0], [2.0, 3.0]] if use_ema else [])


def test_an_optimizer_says_what_it_is_made_of():
    inner = [keras.optimizers.SGD(), keras.optimizers.Adam()]
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(inner[0], {"a": inner[1]}))
    scaled = keras.optimizers.LossScaleOptimizer(inner[0])
    assert keras_private.optimizers_in(scaled) == [scaled, inner[0]]
    assert set(keras_private.optimizers_in(several)) == {several, *inner}


def test_files_are_read_and_written_by_these_functions_of_keras(tmp_path):
    native, legacy = keras_private.saving_modules()
    seen = []

    def noting(name):
        return lambda original, *args, **kwargs: seen.append((name, args)) or original(*args, **kwargs)

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(), keras.losses.MeanSquaredError())
    save_state, load_state = keras_private.NATIVE_FILES
    save_hdf5, load_hdf5, load_by_name = keras_private.LEGACY_HDF5
    with ExitStack() as stack:
        for module, names in (
            (native, keras_private.NATIVE_FILES),
            (legacy, [*keras_private.LEGACY_HDF5, keras_private.LEGACY_OPTIMIZER]),
        ):
            for name in names:
                stack.enter_context(hooked(module, name, noting(name)))
        for name in ("m.weights.h5", "m.h5"):
            (model.save_weights if "weights" in name else model.save)(tmp_path / name)
            model.load_weights(tmp_path / name)
        model.load_weights(tmp_path / "m.h5", by_name=True)
    for name in (save_state, load_state):
        assert {id(args[0]) for which, args in seen if which == name} >= {id(model), id(model.optimizer)}
    for name in (save_hdf5, load_hdf5, load_by_name):
        assert [any(value is model for value in args) for which, args in seen if which == name] == [True]
    assert [args[1] for which, args in seen if which == keras_private.LEGACY_OPTIMIZER] == [model.optimizer]


def test_a_layer_hears_of_every_attribute_that_is_set_on_it():
    heard = []

    def hear(name, value):
        heard.append(name)
        return name, value

    layer = keras.layers.Dense(2)
    layer.__dict__[keras_private.SET] = hear
    layer.trainable, layer.dtype_policy = False, "mixed_bfloat16"
    assert heard[0] == "trainable" and "dtype_policy" in heard and not layer.trainable


def test_an_optimizer_is_unbuilt_as_if_it_had_not_been_built():
    def make():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1, gradient_accumulation_steps=2))

    optimizer, new = make(), make()
    first, other = keras.Variable([1.0]), keras.Variable([1.0, 2.0])
    optimizer.build([first])
    assert [int(v) for v in keras_private.step_counts(optimizer)] == [0, 0]
    keras_private.unbuild(optimizer, new)
    assert not optimizer.built and len(optimizer.variables) == len(new.variables)
    for each in (optimizer, new):
        each.build([other])
        each.inner_optimizer.apply([keras.ops.ones(2)], [other])
    assert [v.shape for v in optimizer.variables] == [v.shape for v in new.variables]
    assert keras_private.trained_by(optimizer) == [other]
    assert [int(v) for v in keras_private.step_counts(optimizer)] == [0, 1]


def test_variables_of_lora_are_those_that_enable_lora_adds():
    layers = [keras.layers.Dense(3, name="a"), keras.layers.Dense(2, name="b")]
    outer = keras.Sequential([keras.Input((4,)), *layers])
    assert keras_private.lora_ids(outer) == set()
    layers[1].enable_lora(1)
    assert keras_private.lora_ids(outer) == {id(layers[1].lora_kernel_a), id(layers[1].lora_kernel_b)}


def test_a_call_knows_its_arguments_and_who_made_them_and_is_repeated_with_another_operation():
    inputs, other = keras.Input((4,)), keras.Input((4,))
    first, second, third = (keras.layers.Dropout(0.5) for _ in range(3))
    second(first(inputs), training=False)
    (call,) = keras_private.calls_in(second)
    args, kwargs = keras_private.arguments_of(call)
    assert len(args) == 1 and kwargs["training"] is False and keras_private.makers_of(call) == [first]
    keras_private.call_again(call, {id(args[0]): other}, third)
    assert keras_private.calls_in(third)[0].input_tensors == [other] and len(keras_private.calls_in(second)) == 1
