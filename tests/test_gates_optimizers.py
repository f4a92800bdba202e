"""Closed means closed: no optimizer moves a weight behind a closed gate, or anything it keeps for it."""

import keras
import numpy as np
import pytest
from helpers import values
from keras import ops

import finetooth as ft
from finetooth import bits

OPTIMIZERS = {
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "SGD": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "EMA": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.AdamW(0.01, gradient_accumulation_steps=2),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1, l2_regularization_strength=0.1),
    "Muon": lambda: keras.optimizers.Muon(0.01, exclude_embeddings=False),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "amsgrad, clipped": lambda: keras.optimizers.Adam(0.01, amsgrad=True, clipnorm=0.1),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.01)),
    "several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.AdamW(0.01), {".*hidden.*": keras.optimizers.SGD(0.01, 0.9)})
    ),
}
OPEN = (True, False, False, True, True, False)


def network(hidden):
    constraint = keras.constraints.MaxNorm(0.9)
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, "tanh", name="below"),
            hidden,
            keras.layers.Dense(2, name="above", kernel_constraint=constraint),
        ]
    )


def hidden():
    keras.utils.set_random_seed(1)
    inner = [keras.layers.Dense(4, name="hidden", kernel_regularizer="l2", kernel_constraint="unit_norm")]
    return keras.Sequential([keras.Input((4,)), *inner, keras.layers.BatchNormalization(name="norm")], name="block")


def state_of(model, block):
    """The weights of the block, and what the optimizer keeps for them."""
    names = [v.path.replace("/", "_") for v in block.trainable_variables]
    slots = [v for v in model.optimizer.variables if any(name in v.path.replace("/", "_") for name in names)]
    if isinstance(model.optimizer, keras.optimizers.Adafactor) and model.optimizer.built:
        indices = [model.optimizer._get_variable_index(v) for v in block.trainable_variables]
        slots += [kept[i] for i in indices for kept in (model.optimizer._r, model.optimizer._c)]
    return [*block.weights, *slots]


def copies(variables):
    return [np.array(bits.read(v)) for v in variables]


def batches(rng, count):
    return [tuple(rng.normal(size=(5, n)).astype("float32") for n in (3, 2)) for _ in range(count)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gate_that_opens_and_closes_trains_as_if_closed_steps_had_not_been(name, rng):
    """Against plain Keras, where after each closed step everything of the block is put back by hand."""
    data = batches(rng, len(OPEN))
    plain_block, gated_block = hidden(), hidden()
    plain = network(plain_block)
    switch = keras.Variable(True, dtype="bool", trainable=False)
    gated = network(ft.Gate(gated_block, when=switch, name="gate"))
    for layer in ("below", "above"):
        gated.get_layer(layer).set_weights(plain.get_layer(layer).get_weights())
    plain.compile(OPTIMIZERS[name](), "mse")
    gated.compile(OPTIMIZERS[name](), "mse")
    for opened, (x, y) in zip(OPEN, data):
        put_back = None if opened else copies(state_of(plain, plain_block))
        plain.train_on_batch(x, y)
        if not opened:
            for variable, value in zip(state_of(plain, plain_block), put_back):
                variable.assign(value)
        before = copies(state_of(gated, gated_block)) if gated.optimizer.built else []
        switch.assign(opened)
        gated.train_on_batch(x, y)
        after = copies(state_of(gated, gated_block))
        if not opened:
            assert len(after) > len(gated_block.weights)
            assert not any(bits.differing(a, b).any() for a, b in zip(before, after))
        else:
            assert not before or any(bits.differing(a, b).any() for a, b in zip(before, after))
    expected, found = values(plain), values(gated)
    for path, value in expected.items():
        own = path.replace("block/", "gate/block/")
        np.testing.assert_allclose(found[own], value, rtol=2e-4, atol=2e-6, err_msg=path)
    for a, b in zip(copies(state_of(plain, plain_block)), copies(state_of(gated, gated_block))):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["EMA", "global norm", "accumulation"])
def test_closed_from_the_first_step_is_a_frozen_layer(name, rng):
    make = OPTIMIZERS.get(name, lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.01))
    data = [np.concatenate(parts) for parts in zip(*batches(rng, len(OPEN)))]
    models = []
    for gated in (False, True):
        keras.utils.set_random_seed(1)
        layer = keras.layers.Dense(4, name="hidden", kernel_regularizer="l2")
        model = network(ft.Gate(layer, when=False) if gated else layer)
        if gated:
            model.get_layer("below").set_weights(models[0].get_layer("below").get_weights())
            layer.set_weights(models[0].get_layer("hidden").get_weights())
            model.get_layer("above").set_weights(models[0].get_layer("above").get_weights())
            before = values(model)
            models[0].fit(*data, batch_size=5, shuffle=False, verbose=0)
        else:
            layer.trainable = False
        model.compile(make(), "mse")
        models.append(model)
    models[1].fit(*data, batch_size=5, shuffle=False, verbose=0)
    after = values(models[1])
    for path, value in before.items():
        assert bits.differing(value, after[path]).any() != ("hidden" in path)
    for layer in ("below", "above"):
        for a, b in zip(models[0].get_layer(layer).get_weights(), models[1].get_layer(layer).get_weights()):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


MODES = ["eager", "compiled", "float16", *(["several steps"] if keras.backend.backend() != "torch" else [])]


@pytest.mark.parametrize("mode", MODES)
def test_ways_to_run_fit(mode, rng):
    """A schedule of closed steps, over two calls of fit; then the weights stand still while the rest goes on."""
    options = {
        "eager": {"run_eagerly": True},
        "compiled": {"jit_compile": keras.backend.backend() != "torch"},
        "several steps": {"steps_per_execution": 3},
    }
    block = keras.layers.Dense(4, name="hidden", dtype="mixed_float16" if mode == "float16" else None)
    model = network(ft.Gate(block, when=ft.Schedule(end=6), name="gate"))
    model.compile(keras.optimizers.AdamW(0.01), "mse", auto_scale_loss=True, **options.get(mode, {}))
    if mode == "float16":
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.01), 2.0**10), "mse")
    data = [np.concatenate(parts) for parts in zip(*batches(rng, len(OPEN)))]
    start = values(model)
    model.fit(*data, batch_size=5, verbose=0)
    opened, slots = values(model), copies(state_of(model, block))
    model.fit(*data, batch_size=5, verbose=0)
    closed = values(model)
    assert all(bits.differing(start[path], opened[path]).any() for path in start)
    for path in start:
        assert bits.differing(opened[path], closed[path]).any() != ("hidden" in path)
    assert not any(bits.differing(a, b).any() for a, b in zip(slots, copies(state_of(model, block))))
    assert int(bits.read(model.get_layer("gate").step)) == 12


def test_an_optimizer_is_guarded_once_also_after_another_compile(rng):
    data = batches(rng, 1)[0]
    gate = ft.Gate(keras.layers.Dense(4, name="hidden"), when=False)
    model = network(gate)
    before = values(model)
    for _ in range(2):
        model.compile(keras.optimizers.AdamW(0.1), "mse")
        model.fit(*data, verbose=0)
        hook = model.optimizer.apply
        assert ft.Gate.guard(model.optimizer) is model.optimizer and model.optimizer.apply is hook
    moved = {path for path, value in values(model).items() if bits.differing(value, before[path]).any()}
    assert moved and not any("hidden" in path for path in moved)


def test_a_loop_of_ones_own(rng):
    """An optimizer that is guarded by hand; gates in gates; a gate that is called twice in a step."""
    inner = ft.Gate(keras.layers.Dense(3, name="core"), name="inner")
    outer = ft.Gate(keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(3, name="rest")]), name="outer")
    model = keras.Sequential([keras.Input((3,)), outer, keras.layers.Dense(3, name="top")])
    optimizer = ft.Gate.guard(keras.optimizers.AdamW(0.1))
    one, other = (ops.convert_to_tensor(rng.normal(size=(5, 3)).astype("float32")) for _ in range(2))
    variables = model.trainable_variables

    def step(*conditions):
        before = values(model)

        def loss():
            h = sum(outer(x, when=when, training=True) for x, when in zip((one, other), conditions))
            return ops.mean(ops.square(model.get_layer("top")(h)))

        optimizer.apply(ft.gradients(loss, variables)[1], variables)
        return {path for path, value in values(model).items() if bits.differing(value, before[path]).any()}

    everything = set(values(model))
    top = {"top/kernel", "top/bias"}
    assert step(True, True) == everything
    assert step(False, False) == top
    assert step(False, True) == everything  # with the gradient of the second call alone:
    weights = inner.layer.trainable_variables
    both = ft.gradients(lambda: _sum(outer(one, when=False, training=True), outer(other, training=True)), weights)[1]
    alone = ft.gradients(lambda: _sum(outer(other, training=True)), weights)[1]
    for found, expected in zip(both, alone):
        np.testing.assert_allclose(ops.convert_to_numpy(found), ops.convert_to_numpy(expected), rtol=1e-5)
    inner.when = False
    assert step(True, True) == everything - {path for path in everything if "core" in path}


def _sum(*outputs):
    return sum(ops.sum(y) for y in outputs)


def test_heads_need_an_optimizer_that_keeps_them_apart(rng):
    data = keras.Input((4, 6))
    gate = ft.Gate(keras.layers.MultiHeadAttention(2, 3), per_head=True)
    model = keras.Model(data, gate(data, data, when=ops.array([True, False])))
    model.compile(keras.optimizers.Adafactor(0.1), "mse")
    x = rng.normal(size=(2, 4, 6)).astype("float32")
    with pytest.raises(ft.FinetoothError, match="heads are not apart"):
        model.fit(x, x, verbose=0)


def test_optimizers_that_choose_elements_do_not_know_gates(rng):
    model = keras.Sequential([keras.Input((3,)), ft.Gate(keras.layers.Dense(2))])
    model.compile(ft.LazyOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(ft.TuningError, match="LazyOptimizer does not know gates"):
        model.fit(*batches(rng, 1)[0], verbose=0)
    with pytest.raises(ft.FinetoothError, match="Keras optimizer"):
        ft.Gate.guard("adam")
