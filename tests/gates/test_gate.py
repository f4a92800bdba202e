"""Gates: what runs, what trains and what stands still, by a condition that is known when the layer runs."""

import json

import keras
import numpy as np
import pytest
from helpers import copy_of, values
from keras import ops

import finetooth as ft
from finetooth.keras_internals.weights import to_numpy, weights_by_path
from finetooth.regions import bits

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "jax":
    import jax

X = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(6, 4)).astype("float32")


def switch(value=1.0):
    return keras.Variable(value, trainable=False, name="switch")


def dense(name="dense", **options):
    return keras.layers.Dense(4, name=name, **options)


def sequence(*layers):
    return keras.Sequential([keras.Input((4,)), *layers])


def numbers(value):
    return np.array(ops.convert_to_numpy(ops.stop_gradient(ops.convert_to_tensor(value))))


def moved(before, after):
    return {path for path in before if bits.differing(before[path], after[path]).any()}


def gradients(function, variables):
    """Of the sum of a function's squared outputs, as training runs it; zeros where there is none."""
    _, found = ft.gradients(lambda: ops.sum(ops.square(function())), variables)
    return [np.zeros(v.shape) if g is None else numbers(g) for v, g in zip(variables, found)]


def compiled(function, *args):
    """Run a function of tensors as one that the backend has traced."""
    args = [ops.convert_to_tensor(a) for a in args]
    if BACKEND == "jax":
        return jax.jit(function)(*args)
    return tf.function(function)(*args) if BACKEND == "tensorflow" else function(*args)


class Counting(keras.layers.Layer):
    """A layer that counts how often it is executed, not traced, and is the identity times a weight."""

    def __init__(self, **options):
        super().__init__(**options)
        self.runs, self.traces = [], 0

    def build(self, shape):
        self.w = self.add_weight((shape[-1],), initializer="ones")

    def call(self, x):
        self.traces += 1
        if BACKEND == "tensorflow":
            tf.py_function(lambda: self.runs.append(1), [], [])
        elif BACKEND == "jax":
            jax.debug.callback(lambda: self.runs.append(1))
        else:
            self.runs.append(1)
        return x * self.w

    def executed(self):
        if BACKEND == "jax":
            jax.effects_barrier()
        count = len(self.runs)
        self.runs.clear()
        return count


@pytest.mark.parametrize(("closed", "when"), [("frozen", switch), ("stop", ft.Schedule), ("skip", lambda: 1.0)])
def test_an_open_gate_is_not_there(closed, when):
    norm = keras.layers.BatchNormalization(name="n")
    plain = sequence(dense("a", activation="tanh"), dense("b", use_bias=False), norm)
    a, b, norm = copy_of(plain).layers
    gated = sequence(a, ft.Gate(b, when=when(), closed=closed), ft.Gate(norm, when=when(), closed=closed))
    for model in (gated, plain):
        model.compile(keras.optimizers.AdamW(0.1), "mse")
        model.fit(X, Y, batch_size=3, epochs=2, shuffle=False, verbose=0)
    for layer, twin in zip((a, b, norm), plain.layers):
        for own, expected in zip(layer.get_weights(), twin.get_weights()):
            np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("traced", [False, True])
def test_frozen_passes_gradients_below_and_stop_does_not(traced):
    below, layer = dense("below"), dense("inner")
    sequence(below, layer)

    def run(when, closed):
        gate = lambda x, c: ft.gate(layer, below(x), when=c, closed=closed)  # noqa: E731
        weights = [below.kernel, layer.kernel]
        if not traced:
            return gradients(lambda: gate(X, when), weights)
        if BACKEND == "tensorflow":
            step = tf.function(lambda c: tf.gradients(tf.reduce_sum(gate(X, c) ** 2), [w.value for w in weights]))
            return [numbers(g) for g in step(tf.constant(when))]
        if BACKEND == "jax":

            def loss(values, c):
                with keras.StatelessScope(list(zip(weights, values))):
                    return ops.sum(gate(X, c) ** 2)

            return [numbers(g) for g in jax.jit(jax.grad(loss))([w.value for w in weights], when)]
        return gradients(lambda: gate(X, ops.convert_to_tensor(when)), weights)

    expected = gradients(lambda: layer(below(X)), [below.kernel, layer.kernel])
    for closed, flows in (("frozen", (1, 0)), ("stop", (0, 0))):
        for found, wanted in zip(run(True, closed), expected):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        for found, wanted, flow in zip(run(False, closed), expected, flows):
            np.testing.assert_allclose(found, wanted * flow, rtol=1e-4, atol=1e-5)
    found = run(False, "skip")
    np.testing.assert_allclose(found[0], gradients(lambda: below(X), [below.kernel])[0], rtol=1e-4, atol=1e-5)
    assert not found[1].any()


@pytest.mark.parametrize("closed", ["frozen", "stop", "skip"])
def test_what_fit_moves_while_the_gate_is_closed(closed):
    when = switch(0.0)
    block = keras.Sequential([keras.Input((4,)), dense("b"), keras.layers.BatchNormalization(name="n")], name="block")
    model = sequence(dense("a"), ft.Gate(block, when=when, closed=closed, name="gate"), dense("c"))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    start = values(model)
    model.fit(X, Y, verbose=0)
    shut = values(model)
    above, below = {"c/kernel", "c/bias"}, {"a/kernel", "a/bias"}
    assert moved(start, shut) == above | (set() if closed == "stop" else below)
    when.assign(1.0)
    model.fit(X, Y, verbose=0)
    assert moved(shut, values(model)) >= above | below | {"gate/block/b/kernel", "gate/block/n/moving_mean"}


def test_a_skipped_layer_is_not_computed_and_nothing_is_traced_again():
    layer, when = Counting(), switch()
    model = sequence(ft.Gate(layer, when=when, closed="skip"), dense())
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=3, verbose=0)
    assert layer.executed() >= 2
    traces = layer.traces
    for value in (0.0, 1.0, 0.0):
        when.assign(value)
        model.fit(X, Y, batch_size=3, verbose=0)
        assert (layer.executed() > 0) == bool(value)
    assert BACKEND == "torch" or layer.traces == traces
    assert layer.executed() == 0
    output = ops.convert_to_numpy(model.layers[-1](X))
    np.testing.assert_allclose(model.predict(X, verbose=0), output, rtol=1e-5)  # also at inference
    assert layer.executed() == 0


def test_a_bypass_takes_the_place_of_a_skipped_layer():
    when = switch(0.0)
    shape = ft.Gate(dense(), when=when, closed="skip", bypass=dense("other"))
    halves = ft.Gate(keras.layers.Dense(2), when=when, closed="skip", bypass=lambda x: x[:, :2])
    model = sequence(shape, halves)
    expected = numbers(shape.bypass(X))[:, :2]
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=1e-5)
    model.compile("sgd", "mse")
    before = values(model)
    model.fit(X, Y[:, :2], verbose=0)
    assert moved(before, values(model)) == {f"{shape.name}/other/kernel", f"{shape.name}/other/bias"}


def test_a_gate_by_chance_is_seeded_open_as_often_as_said_and_always_at_inference():
    def opened(seed):
        layer = Counting()
        gate = ft.Gate(layer, when=0.25, closed="skip", seed=seed)
        gate(X)
        layer.executed()
        found = [gate(X, training=True) is None or layer.executed() for _ in range(200)]
        gate(X)
        assert layer.executed() == 1
        return found

    draws = opened(1)
    assert draws == opened(1) != opened(2)
    assert 30 <= sum(draws) <= 70


def test_a_function_of_the_step_counts_training_calls():
    seen = []

    def first_two(step):
        seen.append(step)
        return step < 2

    layer = dense()
    model = sequence(ft.Gate(layer, when=first_two, name="gate"), dense("out"))
    model.compile("sgd", "mse")
    model.evaluate(X, Y, verbose=0)
    for step in range(4):
        before = values(model)
        model.fit(X, Y, verbose=0)
        assert ("gate/dense/kernel" in moved(before, values(model))) == (step < 2)
    assert seen


def test_a_condition_that_the_model_is_given():
    """One of its inputs, a scalar for each example; and a scalar made of them."""
    data, keep = keras.Input((4,)), keras.Input((), dtype="bool")
    each, some = ft.Gate(dense("b"), closed="stop", name="each"), ft.Gate(dense("c"), name="some")
    h = some(each(dense("a")(data), when=keep), when=ops.any(keep))
    model = keras.Model([data, keep], h)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    before = values(model)
    model.fit([X, np.zeros(6, bool)], Y, verbose=0)
    assert moved(before, values(model)) == set()
    model.fit([X, np.arange(6) == 2], Y, verbose=0)
    assert moved(before, values(model)) == set(before)


@pytest.mark.parametrize("closed", ["frozen", "stop"])
def test_per_example_the_gradient_is_that_of_the_open_examples(closed):
    below, layer = dense("below"), dense("inner", activation="tanh")
    sequence(below, layer)
    weights = [below.kernel, layer.kernel]
    keep = np.array([1, 0, 1, 0, 0, 1])
    plain = numbers(layer(below(X)))
    of_open = gradients(lambda: layer(below(X[keep == 1])), weights)
    of_all = gradients(lambda: layer(below(X)), weights)
    expected = [of_all[0] if closed == "frozen" else of_open[0], of_open[1]]
    found = gradients(lambda: ft.gate(layer, below(X), when=keep, closed=closed), weights)
    for own, wanted in zip(found, expected):
        np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=1e-5)
    traced = compiled(lambda x, c: ft.gate(layer, below(x), when=c, closed=closed), X, keep.astype(bool))
    np.testing.assert_allclose(numbers(traced), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_what_is_behind_a_closed_gate_stays_there(bad):
    """0 x inf is NaN: an example that is left out must not even be multiplied by zero."""
    layer = dense(kernel_initializer="ones", activation="exponential")
    gate = ft.Gate(layer, closed="stop")
    below = dense("below")
    sequence(below, gate)
    weights = [below.kernel, layer.kernel, layer.bias]
    keep = np.arange(6) > 1
    x = X.copy()
    x[:2] = bad

    def open_ones(y):
        return ops.where(keep[:, None], y, 0.0)

    expected = gradients(lambda: layer(below(x[2:])), weights)
    safe_x = np.where(keep[:, None], x, 0).astype("float32")
    found = gradients(lambda: open_ones(gate(below(safe_x), when=keep, training=True)), weights)
    for own, wanted in zip(found, expected):
        np.testing.assert_allclose(own, wanted, rtol=1e-4)
    found = gradients(lambda: open_ones(gate(ops.convert_to_tensor(x), when=keep, training=True)), weights)
    for own, wanted in zip(found[1:], gradients(lambda: layer(x[2:]), weights)[1:]):
        np.testing.assert_allclose(own, wanted, rtol=1e-4)
    shut = np.zeros(6, bool)
    nothing = lambda: gate(ops.convert_to_tensor(x), when=shut, training=True)  # noqa: E731
    found = gradients(lambda: ops.where(shut[:, None], nothing(), 0.0), weights)
    assert not np.concatenate([g.ravel() for g in found]).any()


class Shifted(keras.layers.Layer):
    """Takes tensors by keyword: some per example, nested too, and some of another kind."""

    def build(self, *shapes):
        self.w = self.add_weight((4,), initializer="ones", name="w")

    def call(self, x, shifts=None, table=None, scale=1.0, absent=None):
        y = ops.exp(x * self.w) * self.w * ops.cast(scale, x.dtype)
        if shifts is not None:
            y = y + ops.exp(self.w * shifts["a"]) + self.w * shifts["b"][0][:, None]
        return y if table is None else y + ops.sum(table) * self.w

    def compute_output_spec(self, x, **kwargs):
        return keras.KerasTensor(x.shape, x.dtype)


def shifts_of(x):
    return {"a": x, "b": [x[:, 0]]}


@pytest.mark.parametrize("closed", ["frozen", "stop"])
@pytest.mark.parametrize("by_gate", [True, False])
def test_closed_examples_are_replaced_in_tensors_given_by_keyword(by_gate, closed):
    layer = Shifted()
    layer.build((None, 4))
    gate = ft.Gate(layer, closed=closed)
    below = keras.Variable(np.ones(4, "float32"))
    keep = np.arange(6) > 1
    x = X.copy()
    x[:2] = np.nan
    more = {"table": ops.convert_to_tensor(X[:3]), "scale": ops.convert_to_tensor(2.0), "absent": None}

    def output(first, data, keep):
        inputs = ops.convert_to_tensor(first) * below
        options = {"shifts": shifts_of(ops.convert_to_tensor(data)), **more}
        if by_gate:
            y = gate(inputs, when=keep, training=True, **options)
        else:
            y = ft.gate(layer, inputs, when=keep, closed=closed, **options)
        return ops.where(ops.reshape(keep, (-1, 1)), y, 0.0)

    def plain():
        return layer(ops.convert_to_tensor(X[2:]) * below, shifts=shifts_of(ops.convert_to_tensor(X[2:])), **more)

    expected = gradients(plain, [layer.w, below])
    for own, wanted in zip(gradients(lambda: output(X, x, keep), [layer.w, below]), expected):
        np.testing.assert_allclose(own, wanted, rtol=1e-4)
    np.testing.assert_allclose(numbers(compiled(output, X, x, keep))[2:], numbers(plain()), rtol=1e-5)


@pytest.mark.parametrize("keyword", [True, False])
def test_a_closed_gate_sends_zeros_to_layers_below_also_by_keyword(keyword):
    """With a gradient of zeros a layer decays; with none Keras would leave it out."""
    data, below = keras.Input((4,)), dense("below")
    gate = ft.Gate(Shifted(), when=False, closed="stop")
    y = gate(data, shifts=shifts_of(below(data))) if keyword else gate(below(data))
    model = keras.Model(data, dense("above")(y))
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5), "mse")
    before = numbers(below.kernel)
    model.fit(X, Y, batch_size=6, verbose=0)
    np.testing.assert_allclose(numbers(below.kernel), before * 0.95, rtol=1e-5)


def test_nan_in_a_skipped_layer_is_not_met():
    layer, when = dense(kernel_initializer=keras.initializers.Constant(np.nan)), switch(0.0)
    model = sequence(dense("a"), ft.Gate(layer, when=when, closed="skip", name="gate"), dense("c"))
    model.compile(keras.optimizers.AdamW(0.1, global_clipnorm=1.0), "mse")
    before = values(model)
    loss = model.fit(X, Y, verbose=0).history["loss"][0]
    after = values(model)
    assert np.isfinite(loss) and moved(before, after) == {"a/kernel", "a/bias", "c/kernel", "c/bias"}
    assert all(np.isfinite(after[path]).all() for path in after if "gate" not in path)


class Adding(keras.layers.Layer):
    """Adds its input's mean to the loss."""

    def call(self, x):
        self.add_loss(ops.mean(x) ** 2)
        return x * 2.0


@pytest.mark.parametrize("closed", ["frozen", "skip"])
def test_what_a_layer_adds_to_the_loss_counts_once_and_only_when_open(closed):
    when = switch()
    model = sequence(ft.Gate(Adding(), when=when, closed=closed))
    model.compile("sgd", "mse")
    added = float(np.mean(X) ** 2)
    for opened in (1.0, 0.0, 1.0):
        when.assign(opened)
        output = 2 * X if opened or closed == "frozen" else X
        expected = np.mean((output - Y) ** 2) + opened * added
        assert model.train_on_batch(X, Y) == pytest.approx(expected, rel=1e-4)


def configurations(model):
    return json.loads(json.dumps([layer.get_config() for layer in model.layers]))


def test_a_gate_and_its_state_are_saved_and_loaded(tmp_path):
    gates = [
        ft.Gate(dense(), when=switch(0.0), closed="skip", name="by_variable"),
        ft.Gate(dense(), when=ft.Schedule(start=1, every=2), closed="stop", name="by_step"),
        ft.Gate(dense(), when=0.5, seed=3, name="by_chance"),
        ft.Gate(dense(), when=False, closed="skip", bypass=dense("other"), name="by_bypass"),
    ]
    model = sequence(*gates)
    model.compile(keras.optimizers.AdamW(0.1), "mse")
    model.fit(X, Y, batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    for other in (loaded, clone):
        np.testing.assert_array_equal(other.predict(X, verbose=0), model.predict(X, verbose=0))
        assert configurations(other) == configurations(model)
        assert int(to_numpy(other.get_layer("by_step").step)) == 3
        assert other.get_layer("by_variable").when is not model.get_layer("by_variable").when
    before = values(loaded)
    loaded.fit(X, Y, verbose=0)
    assert "by_step/dense/kernel" in moved(before, values(loaded))
    before = values(loaded)
    loaded.fit(X, Y, verbose=0)
    assert not any("by_step" in path or "by_variable" in path for path in moved(before, values(loaded)))


class Noisy(keras.layers.Layer):
    """Adds what it draws from its own seeds, and returns that too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        noise = keras.random.normal((4,), seed=self.seeds)
        return x + noise, ops.ones_like(x) * noise


@pytest.mark.parametrize("each", [False, True])
def test_seeds_stand_still_and_several_outputs_come_out(each):
    layer = Noisy()
    data, keep = keras.Input((4,)), keras.Input((), dtype="bool")
    outputs = ft.Gate(layer)(data, when=keep if each else ops.all(keep))
    model = keras.Model([data, keep], outputs)
    model.compile("sgd", ["mse", "mse"])
    start = to_numpy(layer.seeds.state).copy()
    losses = [model.train_on_batch([X, np.zeros(6, bool)], [Y, Y]) for _ in range(2)]
    assert losses[0] == losses[1] and (to_numpy(layer.seeds.state) == start).all()
    again = model.train_on_batch([X, np.ones(6, bool)], [Y, Y])
    np.testing.assert_allclose(again, losses[0], rtol=1e-5)  # the draw that was not used up
    assert (to_numpy(layer.seeds.state) != start).any()
    assert model.train_on_batch([X, np.ones(6, bool)], [Y, Y]) != again


def test_masks_pass_through_a_gate():
    tokens = np.array([[1, 2, 0], [3, 0, 0]])
    embedding, lstm = keras.layers.Embedding(5, 4, mask_zero=True), keras.layers.LSTM(4)
    plain = keras.Sequential([keras.Input((3,), dtype="int32"), embedding, lstm])
    when = switch(1.0)
    gates = [ft.Gate(embedding, when=when), ft.Gate(lstm, when=when)]
    gated = keras.Sequential([keras.Input((3,), dtype="int32"), *gates])
    for value in (1.0, 0.0):
        when.assign(value)
        for training in (True, False):
            np.testing.assert_allclose(
                numbers(gated(tokens, training=training)), numbers(plain(tokens, training=training)), rtol=1e-5
            )


@pytest.mark.parametrize("layer_rules", [True, False])
def test_a_part_behind_a_gate_trains_only_while_it_is_open(layer_rules):
    when = switch(0.0)
    model = sequence(dense("a"), ft.Gate(dense("b"), when=when, name="gate"), dense("c"))
    part = ft.select(model, "gate/b/kernel[:, :2]", "c/*")
    with ft.tune(model, part, layer_rules=layer_rules) as tuning:
        model.compile(keras.optimizers.AdamW(0.1), "mse")
        before = values(model)
        model.fit(X, Y, verbose=0)
        assert moved(before, values(model)) == {"c/kernel", "c/bias"}
        when.assign(1.0)
        model.fit(X, Y, verbose=0)
        assert moved(before, values(model)) == {"c/kernel", "c/bias", "gate/b/kernel"}
        gate = model.get_layer("gate")
        when.assign(0.0)
        kernel = gate.layer.kernel
        variables = [v for v in gate.layer.trainable_variables]
        assert not any(g.any() for g in gradients(lambda: gate(X, training=True), variables))
    assert tuning.verify() and set(tuning.patch) == set(part)
    assert kernel is gate.layer.kernel


@pytest.mark.parametrize("kind", ["many", "grouped"])
@pytest.mark.parametrize("closed", ["frozen", "stop", "skip"])
def test_heads(kind, closed, rng):
    def attention():
        if kind == "many":
            return keras.layers.MultiHeadAttention(4, 3, name="attention")
        return keras.layers.GroupQueryAttention(3, 4, 2, name="attention")

    x, y = rng.normal(size=(2, 5, 6)).astype("float32"), rng.normal(size=(2, 5, 6)).astype("float32")
    when = keras.Variable([1.0, 1.0, 1.0, 1.0], trainable=False)
    data = keras.Input((5, 6))
    gate = ft.Gate(attention(), when=when, closed=closed, per_head=True, name="gate")
    below = keras.layers.Dense(6, name="below")
    model = keras.Model(data, gate(*[below(data)] * 2))
    whole = numbers(model(x))
    model.compile(keras.optimizers.AdamW(0.1), "mse")
    start = values(model)
    model.fit(x, y, verbose=0)
    opened = values(model)
    assert moved(start, opened) == set(start)
    when.assign([0.0, 1.0, 0.0, 0.0])  # of the pairs (0, 1) and (2, 3) the second is closed as a whole
    model.fit(x, y, verbose=0)
    shut = values(model)
    part = ft.heads(gate.layer, [1])
    if kind == "grouped":
        part = part | ft.heads(gate.layer, [0, 1]) & ft.select(gate.layer, "**/key/*", "**/value/*")
    for path, value in opened.items():
        changed = bits.differing(value, shut[path])
        if path.startswith("below") or path.endswith("attention_output/bias"):
            assert changed.any()
        elif path in part:
            assert not (changed & ~part[path].mask()).any() and changed[part[path].mask()].any()
        else:
            assert not changed.any()
    # What closed heads give: all, or nothing, whatever they hold.
    model.set_weights([start[p] if p in start else w for p, w in zip(_paths(model), model.get_weights())])
    closed_heads = ft.heads(gate.layer, [0, 2, 3])
    output = numbers(gate(*[below(x)] * 2, training=True))
    if closed != "skip":
        np.testing.assert_allclose(output, whole, rtol=1e-5, atol=1e-6)
        return
    for path, variable in zip(_paths(model), model.weights):
        if path in closed_heads and "attention_output" in path:
            variable.assign(np.where(closed_heads[path].mask(), 0, to_numpy(variable)))
    removed = numbers(gate.layer(*[below(x)] * 2))
    np.testing.assert_allclose(output, removed, rtol=1e-5, atol=1e-6)
    for path, variable in zip(_paths(model), model.weights):
        if path in closed_heads:
            variable.assign(np.where(closed_heads[path].mask(), np.nan, to_numpy(variable)))
    np.testing.assert_allclose(numbers(model.predict(x, verbose=0)), removed, rtol=1e-5, atol=1e-6)


def _paths(model):
    named = {id(v): path for path, v in weights_by_path(model).items()}
    return [named.get(id(v), "") for v in model.weights]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ft.Gate(np.exp), "around a Keras layer"),
        (lambda: ft.Gate(dense(), closed="shut"), "one of 'frozen', 'stop', 'skip'; received 'shut'"),
        (lambda: ft.Gate(dense(), when=1.5), "from 0 to 1; received 1.5"),
        (lambda: ft.Gate(dense(), when=float("nan")), "from 0 to 1; received nan"),
        (lambda: ft.Gate(dense(), when="always"), "received 'always' of type str"),
        (lambda: ft.Gate(dense(), when=ops.ones(3)), "the same at every step"),
        (lambda: ft.Gate(dense(), when=keras.Variable(1.0)), "trainable=False"),
        (lambda: ft.Gate(dense(), when=keras.Variable(np.ones((2, 2)), trainable=False)), r"shape \(2, 2\)"),
        (lambda: ft.Gate(dense(), bypass=dense("b")), 'closed="skip"'),
        (lambda: ft.Gate(dense(), closed="skip", bypass=3), "a layer or a function; received 3"),
        (lambda: ft.Gate(keras.layers.Dense(3), closed="skip")(X), "Give the gate a bypass"),
        (lambda: ft.Gate(keras.layers.Dense(3), closed="skip")(keras.Input((4,))), "Give the gate a bypass"),
        (lambda: ft.Gate(keras.layers.Embedding(9, 4), closed="skip")(keras.Input((4,), dtype="int32")), "bypass"),
        (lambda: ft.Gate(dense(), closed="skip")(X, when=np.ones(6)), "for all examples or none"),
        (lambda: ft.Gate(dense())(X, when=np.ones(5), training=True), "5 values for 6 examples"),
        (lambda: ft.Gate(dense())(X, when=np.ones((6, 1)), training=True), r"received shape \(6, 1\)"),
        (lambda: ft.Gate(dense())(keras.Input((4,)), when=keras.Input((2,))), "received shape"),
        (lambda: ft.Gate(dense())(X, when=np.ones(6) + 1j, training=True), "complex"),
        (lambda: ft.Gate(dense())(X, when="yes", training=True), "booleans or numbers"),
        (lambda: ft.Gate(dense(), per_head=True), "of an attention layer"),
        (lambda: ft.gate(3, X, when=True), "Expected a function or layer"),
        (lambda: ft.gate(ops.exp, X, when=True, closed="frozen"), "are not known"),
        (lambda: ft.gate(ops.exp, X, when=np.ones(6), closed="skip"), "for all examples or none"),
    ],
)
def test_bad_input_is_an_error_that_says_so(make, message):
    with pytest.raises(ft.FinetoothError, match=message):
        make()


def test_a_layer_is_behind_one_gate_at_most():
    layer = dense()
    gate = ft.Gate(layer, name="first")
    with pytest.raises(ft.GateError, match="behind the gate 'first' already"):
        ft.Gate(layer)
    assert sequence(gate)(X).shape == (6, 4)


def test_a_layer_may_be_built_before_or_by_the_gate_and_used_elsewhere_too():
    layer = dense()
    expected = numbers(layer(X))
    model = sequence(ft.Gate(layer, when=False))
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=1e-5)
    data = keras.Input((4,))
    both = keras.Model(data, model.layers[0](data) + layer(data))
    both.compile(keras.optimizers.AdamW(0.1), "mse")
    before = values(both)
    both.fit(X, Y, verbose=0)
    assert not moved(before, values(both))  # closed is closed, wherever else a gradient comes from


def test_functions_are_gated_too():
    weight = keras.Variable(np.ones(4, "float32"))

    def function(x):
        return x * weight

    for closed, value in (("stop", X), ("skip", 3 * X)):
        gated = lambda when, closed=closed: ft.gate(  # noqa: E731
            function,
            ops.convert_to_tensor(X),
            when=when,
            closed=closed,
            bypass=(lambda x: 3 * x) if closed == "skip" else None,
        )
        np.testing.assert_allclose(numbers(gated(False)), value, rtol=1e-6)
        np.testing.assert_allclose(numbers(gated(np.array(1))), X, rtol=1e-6)
        np.testing.assert_allclose(numbers(compiled(gated, False)), value, rtol=1e-6)
        np.testing.assert_allclose(numbers(compiled(gated, True)), X, rtol=1e-6)
        assert gradients(lambda: gated(True), [weight])[0].all()  # noqa: B023
        assert not gradients(lambda: gated(False), [weight])[0].any()  # noqa: B023
