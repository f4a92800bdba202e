"""Closed means closed: no optimizer moves a weight behind a closed gate, or anything it keeps for it."""

import keras
import numpy as np
import pytest
from helpers import values
from keras import ops

import finetooth as ft
from finetooth.keras_internals import private as keras_private
from finetooth.keras_internals.weights import to_numpy
from finetooth.optimizers.slots import slots_of
from finetooth.regions import bits

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
    return [np.array(to_numpy(v)) for v in variables]


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.ScheduleFreeAdamW(0.01, gradient_accumulation_steps=2),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.Adafactor(0.01)))
        ),
    ],
)
def test_state_that_a_copy_would_make_otherwise_is_kept(make, rng):
    """ScheduleFree sets its state to the weights; what Adafactor tracks depends on who builds it."""
    switch = keras.Variable(True, dtype="bool", trainable=False)
    block = hidden()
    model = network(ft.Gate(block, when=switch, name="gate"))
    model.compile(make(), "mse")
    for opened in (True, True, False, False, True, True):
        switch.assign(opened)
        mine = {id(v) for v in block.trainable_variables}
        slots = [slot.variable for slot in slots_of(model.optimizer) if id(slot.owner) in mine]
        before, above = copies([*block.trainable_variables, *slots]), copies([model.get_layer("above").kernel])
        data = batches(rng, 1)[0]
        model.train_on_batch(*data)
        after, now = copies([*block.trainable_variables, *slots]), copies([model.get_layer("above").kernel])
        assert any(bits.differing(a, b).any() for a, b in zip(before, after)) or not opened
        assert not any(bits.differing(a, b).any() for a, b in zip(before, after)) or opened
    assert bits.differing(above[0], now[0]).any()


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
    assert int(to_numpy(model.get_layer("gate").step)) == 12


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


CLIPPED = {
    "global norm": lambda: keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=0.01),
    "norm": lambda: keras.optimizers.SGD(5.0, clipnorm=0.01),
    "global norm, accumulated": lambda: keras.optimizers.SGD(5.0, global_clipnorm=0.01, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(5.0, global_clipnorm=0.01)),
    "average": lambda: keras.optimizers.SGD(
        5.0, global_clipnorm=0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=1
    ),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_an_open_gate_counts_in_no_norm(name, rng):
    """Against the plain model, where all gradients are clipped to a norm far below what one flag would add."""
    data = [np.concatenate(parts) for parts in zip(*batches(rng, 4))]
    models = []
    for gated in (False, True):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(3, name=name) for name in "abc"]
        inner = [ft.Gate(layer, when=ft.Schedule()) if gated else layer for layer in layers]
        model = keras.Sequential([keras.Input((3,)), *inner, keras.layers.Dense(2, name="top")])
        for layer, weights in zip(layers, ([*rng.normal(size=(1, 3, 3)), np.ones(3)] for _ in layers)):
            if not gated:
                layer.set_weights(weights)
        models.append((model, [*layers, model.layers[-1]]))
    for layer, twin in zip(models[0][1], models[1][1]):
        twin.set_weights(layer.get_weights())
    for model, _ in models:
        model.compile(CLIPPED[name](), "mse")
        model.fit(*data, batch_size=5, shuffle=False, verbose=0)
    for layer, twin in zip(models[0][1], models[1][1]):
        for expected, found in zip(layer.get_weights(), twin.get_weights()):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def global_norm(gradients, dtype):
    """As optax and PyTorch compute it."""
    return np.sqrt(sum(np.sum(np.square(np.asarray(g, dtype)), dtype=dtype) for g in gradients))


def own_loop(opened, change, optimizer, rng, per_head=False):
    """A step of a loop of one's own, which changes the gradients first. Returns what moved and the model."""
    layer = keras.layers.MultiHeadAttention(2, 2, name="core") if per_head else keras.layers.Dense(3, name="core")
    gate = ft.Gate(layer, per_head=per_head, name="gate")
    top = keras.layers.Dense(3, name="top")
    x = keras.Input((4, 3))
    model = keras.Model(x, top(gate(x, x) if per_head else gate(x)))
    variables = model.trainable_variables
    optimizer = ft.Gate.guard(optimizer)
    optimizer.build(variables)
    x = ops.convert_to_tensor(rng.normal(size=(5, 4, 3)).astype("float32"))

    def loss():
        hidden = gate(*[x] * (1 + per_head), when=ops.array(opened), training=True)
        return optimizer.scale_loss(1e-6 * ops.sum(ops.square(top(hidden))))

    _, gradients = ft.gradients(loss, variables)
    before = values(model)
    gradients = [ops.zeros(v.shape) if g is None else g for g, v in zip(gradients, variables)]
    found = [to_numpy(g).copy() for g in gradients]
    optimizer.apply([ops.convert_to_tensor(g) for g in change(gradients, variables)], variables)
    return {path for path, value in values(model).items() if bits.differing(value, before[path]).any()}, found


CHANGES = {
    "nothing": lambda g: g,
    "scaled up": lambda g: g * 2.0**15,
    "scaled down": lambda g: g / 2.0**15,
    "scaled down and averaged": lambda g: g / 2.0**24 / 1024.0,
    "averaged over replicas": lambda g: (g + 0 * g) / 2.0,
    "clipped by norm": lambda g: g * ops.minimum(1.0, 1e-9 / ops.maximum(ops.sqrt(ops.sum(g * g)), 1e-30)),
    "bfloat16": lambda g: ops.cast(ops.cast(g, "bfloat16"), "float32"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_loop_does_to_gradients_leaves_gates_open_or_closed(change, rng):
    def each(gradients, variables):
        return [CHANGES[change](g) for g in gradients]

    everything = {"gate/core/kernel", "gate/core/bias", "top/kernel", "top/bias"}
    for opened, expected in ((True, everything), (False, {"top/kernel", "top/bias"})):
        assert own_loop(opened, each, keras.optimizers.AdamW(0.1), rng)[0] == expected


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("per_head", [False, True])
def test_the_norm_of_all_gradients_is_that_of_the_weights_to_the_bit(opened, per_head, rng):
    opened = [opened, True] if per_head else opened
    norms = {}

    def clip(gradients, variables):
        weights = [g for g, v in zip(gradients, variables) if v.name != "open"]
        assert len(weights) == len(gradients) - 1
        for dtype in ("float32", "float64"):
            norms[dtype] = [global_norm(map(to_numpy, some), dtype) for some in (gradients, weights)]
        return [g * (1e-9 / norms["float32"][0]) for g in gradients]

    moved, found = own_loop(opened, clip, keras.optimizers.SGD(1e9), rng, per_head)
    assert 1e-9 < norms["float32"][0] < 1e-3
    assert all(a == b for a, b in norms.values())
    assert any("core" in path for path in moved) == (opened is not False)


@pytest.mark.parametrize("opened", [True, False])
def test_a_scale_that_grows_without_bound_leaves_a_gate_open(opened, rng):
    """After 100 steps the loss is scaled by 2 ** 100, and the flag's gradient divided by as much."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), 1.0, dynamic_growth_steps=1)
    model = keras.Sequential([keras.Input((3,)), ft.Gate(keras.layers.Dense(2, name="core"), when=opened, name="gate")])
    model.compile(optimizer, "mse")
    x, y = np.full((100, 3), 1e-9, "float32"), np.full((100, 2), 1e-9, "float32")
    model.fit(x, y, batch_size=1, verbose=0)
    assert float(to_numpy(optimizer.dynamic_scale)) > 2.0**90
    before = values(model)
    optimizer.inner_optimizer.weight_decay = 0.1
    optimizer.learning_rate = 1.0
    model.train_function = None
    model.fit(x[:1], y[:1], verbose=0)
    moved = {path for path, value in values(model).items() if bits.differing(value, before[path]).any()}
    assert moved == ({"gate/core/kernel", "gate/core/bias"} if opened else set())


@pytest.mark.parametrize("make", [keras.optimizers.AdamW, lambda rate: keras.optimizers.SGD(rate, use_ema=True)])
def test_a_weight_behind_two_gates_trains_when_both_are_open(make, rng):
    """Neither condition is known when the step is traced."""
    switches = [keras.Variable(True, dtype="bool", trainable=False) for _ in range(2)]
    inner = ft.Gate(keras.layers.Dense(3, name="core"), when=switches[0], name="inner")
    block = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(3, name="rest")], name="block")
    model = keras.Sequential([keras.Input((3,)), ft.Gate(block, when=switches[1], name="outer"), keras.layers.Dense(2)])
    model.compile(make(0.1), "mse")
    data = batches(rng, 1)[0]
    for opened in ((True, True), (False, True), (True, False), (False, False), (True, True)):
        for switch, value in zip(switches, opened):
            switch.assign(value)
        before = values(model)
        model.train_on_batch(*data)
        moved = {path for path, value in values(model).items() if bits.differing(value, before[path]).any()}
        assert any("core" in path for path in moved) == all(opened)
        assert any("rest" in path for path in moved) == opened[1]
        assert any("outer" not in path for path in moved)


class Outer(keras.Model):
    """Calls a model that is not compiled; on JAX it is not called itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x, training=None):
        return self.inner(x, training=training)


@pytest.mark.parametrize("eagerly", [True, False])
def test_the_optimizer_is_found_where_the_model_runs(eagerly, rng, monkeypatch):
    """Not among all objects there are, some of which may be models half made, as KerasHub leaves them."""
    half_made = keras.Model.__new__(keras.Model)
    model = Outer(network(ft.Gate(keras.layers.Dense(4, name="hidden"), when=False)))
    other = keras.Sequential([model.inner])
    data = batches(rng, 1)[0]
    model(data[0])
    model.compile(keras.optimizers.AdamW(0.1), "mse", run_eagerly=eagerly)
    other.compile("sgd", "mse")
    before = values(model)
    with monkeypatch.context() as patch:
        patch.setattr("gc.get_objects", lambda: pytest.fail("all objects were looked through"))
        model.fit(*data, verbose=0)
    moved = {path for path, value in values(model).items() if bits.differing(value, before[path]).any()}
    assert moved and not any("hidden" in path for path in moved)
    assert "apply" not in other.optimizer.__dict__ and half_made is not None


def test_state_that_an_optimizer_makes_later_is_known(rng):
    """Of several optimizers one is built after the first closed step."""
    gates = [ft.Gate(keras.layers.Dense(3, name=name), when=False, closed="stop", name=f"gate_{name}") for name in "ab"]
    for gate in gates:
        gate.build((None, 3))
    momentum = keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = keras.optimizers.MultiOptimizer(lambda variable: momentum["b" in variable.path.split("/")])
    optimizer = ft.Gate.guard(optimizer)
    first, second = (gate.trainable_variables for gate in gates)
    optimizer.build(first)
    assert {id(slot.owner) for slot in slots_of(optimizer)} == {id(v) for v in first}
    optimizer.optimizers.append(momentum[1])
    momentum[1].build(second)
    assert {id(slot.owner) for slot in slots_of(optimizer)} == {id(v) for v in [*first, *second]}


def test_a_variable_that_is_a_condition_is_left_as_it_is(rng):
    for value in (np.ones((), "float32"), True):
        switch = keras.Variable(value, dtype="bool", trainable=False)
        before = keras_private.raw_value(switch)
        gate = ft.Gate(keras.layers.Dense(2), when=switch)
        gate.build((None, 3))
        assert keras_private.raw_value(switch) is before
    switch = keras.Variable(1.0, trainable=False)
    before = keras_private.raw_value(switch)
    with pytest.raises(ft.FinetoothError):
        ft.Gate(keras.layers.Dense(2), when=switch, closed="never")
    ft.Gate(keras.layers.Dense(2), when=switch)
    assert keras_private.raw_value(switch) is before
