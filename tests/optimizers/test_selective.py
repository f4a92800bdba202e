"""SelectiveOptimizer: the oracle is the inner optimizer itself, run by Keras on the selected elements alone."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers import moved_inside, moved_outside, values
from natives import NATIVE, bare, kinds, numpy_of, sparse

import finetooth as ft
from finetooth.optimizers.slots import slots_of
from finetooth.regions import bits
from finetooth.regions.indexing import region_at

K = keras.optimizers
OPTIMIZERS = {
    "SGD, momentum": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda: K.AdamW(0.1, weight_decay=0.3),
    "Adam, amsgrad, EMA": lambda: K.Adam(0.1, amsgrad=True, use_ema=True, ema_overwrite_frequency=2),
    "RMSprop, centered": lambda: K.RMSprop(0.1, momentum=0.5, centered=True),
    "Adagrad": lambda: K.Adagrad(0.1),
    "Adadelta": lambda: K.Adadelta(0.5),
    "Adamax, clipnorm": lambda: K.Adamax(0.1, clipnorm=0.5),
    "Nadam": lambda: K.Nadam(0.1),
    "Ftrl": lambda: K.Ftrl(0.1, l1_regularization_strength=0.01),
    "Lion, global clip": lambda: K.Lion(0.1, global_clipnorm=0.5),
    "Lamb": lambda: K.Lamb(0.1),
    "Adafactor": lambda: K.Adafactor(0.1),
    "Muon": lambda: K.Muon(0.1),
    "ScheduleFreeAdamW": lambda: K.ScheduleFreeAdamW(0.1),
    "accumulation": lambda: K.Adam(0.1, gradient_accumulation_steps=2),
    "schedule": lambda: K.Adam(K.schedules.ExponentialDecay(0.1, 2, 0.5)),
}
INDICES = {
    "rows": np.s_[[0, 3, 4]],
    "block": np.s_[1:4, 2:],
    "mask": np.random.default_rng(5).random((6, 5)) < 0.3,
    "all": np.s_[...],
}


def start(seed=0, shape=(6, 5)):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def compact(array, index):
    """The selected elements in the shape in which they are trained."""
    return region_at(array.shape, index).gather(array)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_inside_as_the_inner_optimizer_outside_not_a_bit(name):
    index = INDICES["block"]  # a matrix, which Muon needs
    frozen, variable = keras.Variable(start(1)), keras.Variable(start(), name="weights")
    optimizer = ft.SelectiveOptimizer(OPTIMIZERS[name](), [(variable, index)])
    alone, plain = keras.Variable(compact(start(), index), name="weights_part"), OPTIMIZERS[name]()
    for step in range(5):
        gradient = start(step + 10)
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in (gradient, gradient)], [frozen, variable])
        plain.apply([keras.ops.convert_to_tensor(compact(gradient, index))], [alone])
    optimizer.finalize_variable_values([frozen, variable])
    plain.finalize_variable_values([alone])
    np.testing.assert_allclose(compact(numpy_of(variable), index), numpy_of(alone), rtol=1e-6, atol=1e-7)
    inside = np.zeros((6, 5), bool)
    inside[index] = True
    assert not bits.differing(numpy_of(variable), start())[~inside].any()
    assert not bits.differing(numpy_of(frozen), start(1)).any()
    assert int(optimizer.iterations) == int(plain.iterations)


@pytest.mark.parametrize("kind", kinds if NATIVE != "jax" else kinds[:1])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_every_kind_of_gradient(kind, index):
    """Dense, sparse, sparse with rows that repeat."""
    indices = np.array([3, 0, 3, 5, 3])
    rows = start(3, (5, 5))
    dense = np.zeros((6, 5), "float32")
    np.add.at(dense, indices, rows)
    results = []
    for gradient in (keras.ops.convert_to_tensor(dense), sparse(indices, rows, (6, 5))):
        variable = kind(start())
        optimizer = ft.SelectiveOptimizer(K.Adam(0.1), [(variable, index)])
        for _ in range(2):
            optimizer.apply([gradient], [variable])
        results.append(numpy_of(variable))
        inside = np.zeros((6, 5), bool)
        inside[index] = True
        assert not bits.differing(results[-1], start())[~inside].any()
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def test_nan_outside_stays_there():
    variable = keras.Variable(start())
    gradient = np.full((6, 5), np.nan, "float32")
    gradient[1] = 1
    optimizer = ft.SelectiveOptimizer(K.Adam(0.1, global_clipnorm=1.0), [(variable, np.s_[1])])
    optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
    assert np.isfinite(numpy_of(variable)).all() and (numpy_of(variable)[1] < start()[1]).all()


def test_state_follows_the_selection():
    variable = keras.Variable(start(0, (1000, 50)))
    optimizer = ft.SelectiveOptimizer(K.Adam(0.1, amsgrad=True), [(variable, np.s_[[5, 9]])])
    optimizer.build([variable])
    assert sum(int(np.prod(v.shape)) for v in optimizer.variables) == 4 * 100 + 4  # counts, rates: two of each
    assert optimizer.variables[-3:] == optimizer.inner_optimizer.variables[-3:]


def test_low_precision_is_trained_in_full():
    """A thousand steps of 1e-6 arrive, though each alone is rounded away."""
    variable = keras.Variable(np.ones((4, 2)), dtype="bfloat16")
    optimizer = ft.SelectiveOptimizer(K.SGD(1e-5), [(variable, np.s_[1])])
    for _ in range(1000):
        optimizer.apply([keras.ops.ones((4, 2), "bfloat16")], [variable])
    np.testing.assert_allclose(numpy_of(variable).astype("float32"), [[1, 1], [0.99, 0.99], [1, 1], [1, 1]], atol=4e-3)


def test_values_that_somebody_else_set_are_trained_on():
    variable = keras.Variable(start())
    optimizer = ft.SelectiveOptimizer(K.SGD(1.0), [(variable, np.s_[1])])
    optimizer.apply([keras.ops.ones((6, 5))], [variable])
    variable.assign(np.zeros((6, 5)))
    optimizer.apply([keras.ops.ones((6, 5))], [variable])
    np.testing.assert_array_equal(numpy_of(variable)[:2], [[0] * 5, [-1] * 5])


def test_a_constraint_reaches_the_selected_elements():
    variable = keras.Variable(start())
    variable.constraint = keras.constraints.NonNeg()
    ft_optimizer = ft.SelectiveOptimizer(K.SGD(0.1), [(variable, np.s_[1])])
    ft_optimizer.apply([keras.ops.zeros((6, 5))], [variable])
    np.testing.assert_array_equal(numpy_of(variable)[1], np.maximum(start()[1], 0))
    assert not bits.differing(numpy_of(variable), start())[[0, 2, 3, 4, 5]].any()


def digits():
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "relu", name="hidden"),
            keras.layers.Dense(4, name="head", kernel_constraint=keras.constraints.MaxNorm(1.0)),
        ]
    )


X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(64, 4)).astype("float32")


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("around", ["plain", "loss scale outside", "loss scale inside"])
def test_in_fit(around, policy):
    keras.config.set_dtype_policy(policy)
    try:
        model = digits()
    finally:
        keras.config.set_dtype_policy("float32")
    part = ft.select(model, "hidden/kernel[:, :3]", "head/bias")
    inner = K.AdamW(0.05)
    optimizer = ft.SelectiveOptimizer(K.LossScaleOptimizer(inner) if around == "loss scale inside" else inner, part)
    if around == "loss scale outside":
        optimizer = K.LossScaleOptimizer(optimizer)
    before = values(model)
    model.compile(optimizer, "mse", auto_scale_loss=around == "plain")
    first, *_, last = model.fit(X, Y, epochs=6, batch_size=20, verbose=0).history["loss"]
    after = values(model)
    assert moved_outside(before, after, part) == {}
    assert all(count for count in moved_inside(before, after, part).values())
    assert last < first


def test_fit_agrees_with_tune():
    model, other = digits(), digits()
    other.set_weights(model.get_weights())
    what = ("hidden/kernel[:, :3]", "head/*")
    model.compile(ft.SelectiveOptimizer(K.Adam(0.05), ft.select(model, *what)), "mse")
    model.fit(X, Y, epochs=2, shuffle=False, verbose=0)
    with ft.tune(other, ft.select(other, *what)):
        other.compile(K.Adam(0.05), "mse")
        other.fit(X, Y, epochs=2, shuffle=False, verbose=0)
    for path, value in values(model).items():
        np.testing.assert_allclose(value, values(other)[path], rtol=1e-4, atol=1e-5, err_msg=path)


def test_saved_loaded_and_trained_on(tmp_path):
    """Six epochs are three, a file, and three more."""

    def trained(stop):
        keras.utils.set_random_seed(1)
        model = digits()
        model.compile(ft.SelectiveOptimizer(K.AdamW(0.05), ft.select(model, "hidden/kernel[:, :3]", "head/*")), "mse")
        model.fit(X, Y, epochs=3, shuffle=False, verbose=0)
        if stop:
            model.save(tmp_path / "model.keras")
            model = keras.saving.load_model(tmp_path / "model.keras")
        model.fit(X, Y, epochs=3, shuffle=False, verbose=0)
        return values(model)

    through, stopped = trained(False), trained(True)
    assert all(not bits.differing(through[path], stopped[path]).any() for path in through)


@pytest.mark.parametrize("other", ["hidden/kernel[:, 1:4]", "hidden/kernel[:, :4]"])
def test_state_of_another_selection_is_refused(other, tmp_path):
    def compiled(text):
        model = digits()
        model.compile(ft.SelectiveOptimizer(K.Adam(0.05), ft.select(model, text)), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    compiled("hidden/kernel[:, :3]").save_weights(tmp_path / "x.weights.h5")
    state = {}
    compiled("hidden/kernel[:, :3]").optimizer.save_own_variables(state)
    with pytest.raises(ft.TuningError, match="another selection"):
        compiled(other).optimizer.load_own_variables(state)
    compiled("hidden/kernel[:, :3]").optimizer.load_own_variables(state)


NAMES = {
    "another variable's path ends with it": ("kernel", ["encoder/kernel", "encoder/bias"], None),
    "it ends with another variable's path": ("encoder/kernel", ["kernel", "bias"], None),
    "it ends with a path in a layer": ("model/encoder/kernel", ["encoder/kernel", "encoder/bias"], None),
    "the layer's name ends with it": ("coder/kernel", ["encoder/kernel", "decoder/kernel"], None),
    "two layers of that name": ("dense/kernel", ["first/dense/kernel", "second/dense/kernel"], None),
    "the exact path": ("encoder/kernel", ["kernel", "encoder/kernel", "outer/encoder/kernel"], 1),
    "without the model's name": ("encoder/kernel", ["model/kernel", "model/encoder/kernel", "model/head/bias"], 1),
    "with it": ("model/encoder/kernel", ["model/kernel", "model/encoder/kernel"], 1),
    "with and without at once": ("a/b/c", ["a/b/c", "a/a/b/c"], ["a/b/c", "a/a/b/c"]),
    "a path that two have": ("kernel", ["kernel", "bias", "kernel"], ["kernel", "kernel"]),
}


def named(path):
    *scopes, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(np.ones(4, "float32"), name=name)


@pytest.mark.parametrize("case", NAMES)
def test_a_path_names_one_variable_or_none(case):
    key, paths, expected = NAMES[case]
    variables = [named(path) for path in paths]
    assert [variable.path for variable in variables] == paths
    optimizer = ft.SelectiveOptimizer(K.SGD(1.0), {key: np.s_[:2]})
    if isinstance(expected, int):
        optimizer.apply([keras.ops.ones(4) for _ in paths], variables)
        sums = [numpy_of(variable).sum() for variable in variables]
        assert sums == [2 if position == expected else 4 for position in range(len(paths))]
        return
    message = re.escape(str(expected)) if expected else "none of the variables has that path"
    with pytest.raises(ft.TuningError, match=message):
        optimizer.apply([keras.ops.ones(4) for _ in paths], variables)
    assert all((numpy_of(variable) == 1).all() for variable in variables)


@keras.saving.register_keras_serializable("finetooth_tests")
class Own(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.inner = keras.Sequential([keras.layers.Dense(4, name="dense")], name="inner")
        self.head = keras.layers.Dense(4, name="head")

    def call(self, x):
        return self.head(self.inner(x))


def late():
    model = keras.Sequential([keras.layers.Dense(4, name="dense"), keras.layers.Dense(4, name="head")], name="late")
    model(X[:1])
    return model


def nested():
    inputs = keras.Input((8,))
    parts = [keras.Sequential([keras.layers.Dense(4, name="dense")], name=name) for name in ("first", "second")]
    return keras.Model(inputs, keras.layers.add([part(inputs) for part in parts]), name="nested")


def own():
    model = Own(name="own")
    model(X[:1])
    return model


MODELS = {"late": (late, "dense/kernel"), "nested": (nested, "second/dense/kernel"), "own": (own, "inner/dense/kernel")}


@pytest.mark.parametrize("trained", [False, True], ids=["only compiled", "trained"])
@pytest.mark.parametrize("kind", MODELS)
def test_paths_that_loading_shortens_name_the_same_variables(kind, trained, tmp_path):
    """Keras leaves the names of models out of the paths of a loaded model, which may make two of them the same."""
    make, path = MODELS[kind]
    model = make()
    model.compile(ft.SelectiveOptimizer(K.SGD(0.1), ft.select(model, f"{path}[:, 0]")), "mse", run_eagerly=True)
    if trained:
        model.fit(X, Y, verbose=0)
    for _ in range(2):
        model.save(tmp_path / "model.keras")
        model = keras.saving.load_model(tmp_path / "model.keras")
        before = values(model)
        model.fit(X, Y, verbose=0)
        moved = {p: int(bits.differing(value, before[p]).sum()) for p, value in values(model).items()}
        assert {p: count for p, count in moved.items() if count} == {path: 8}


def test_a_selection_that_paths_do_not_tell_apart_is_not_saved():
    variables = [named("kernel"), named("kernel")]
    optimizer = ft.SelectiveOptimizer(K.SGD(1.0), [(variable, np.s_[:2]) for variable in variables])
    for _ in range(2):
        with pytest.raises(ft.TuningError, match="have the path 'kernel'"):
            optimizer.get_config()
        optimizer.build(variables)


def test_state_of_another_number_of_variables_is_refused():
    """The same selection among more variables is another: what is trained follows from positions."""
    first, second = keras.Variable(start()), keras.Variable(start(1))
    one, two = (ft.SelectiveOptimizer(K.Adam(), [(first, np.s_[1])]) for _ in range(2))
    one.build([first])
    two.build([first, second])
    state = {}
    one.save_own_variables(state)
    with pytest.raises(ft.TuningError, match="another selection"):
        two.load_own_variables(state)


def test_configuration():
    model = digits()
    optimizer = ft.SelectiveOptimizer(K.Adam(0.125), ft.select(model, "hidden/kernel[:, :3]"), name="mine")
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert isinstance(again, ft.SelectiveOptimizer) and again.name == "mine" and float(again.learning_rate) == 0.125
    again.build(model.trainable_variables)
    again.apply([keras.ops.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)
    optimizer.learning_rate = 0.5
    assert float(optimizer.inner_optimizer.learning_rate) == 0.5


def test_stateless_apply():
    variable = keras.Variable(start())
    optimizer = ft.SelectiveOptimizer(K.Adam(0.1), [(variable, np.s_[1])])
    optimizer.build([variable])
    arguments = [v.value for v in optimizer.variables], [keras.ops.ones((6, 5))], [variable.value]
    if NATIVE == "tensorflow":
        with pytest.raises(ft.TuningError, match="not supported"):
            optimizer.stateless_apply(*arguments)
        return
    (new,), state = optimizer.stateless_apply(*arguments)
    assert not bits.differing(numpy_of(variable), start()).any() and len(state) == len(optimizer.variables)
    optimizer.apply([keras.ops.ones((6, 5))], [variable])
    np.testing.assert_allclose(numpy_of(new), numpy_of(variable), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_selection_of_the_same_variables(dtype):
    """Elements that stay keep their moments and their precision; compared with Keras, run on each row by itself."""
    schedule = [np.s_[[0, 2]], np.s_[[2, 3, 5]], np.s_[...], np.s_[2:4]]
    variable = keras.Variable(start(), dtype=dtype)
    began = numpy_of(variable).astype("float32")
    optimizer = ft.SelectiveOptimizer(K.Adam(0.01), [(variable, schedule[0])])
    gradients = [start(seed) for seed in range(8)]
    for i, index in enumerate(schedule):
        if i:
            optimizer = optimizer.reselected([(variable, index)])
        for gradient in gradients[2 * i : 2 * i + 2]:
            optimizer.apply([keras.ops.convert_to_tensor(gradient, dtype)], [variable])
    w, m, v = began.astype("float64"), np.zeros((6, 5)), np.zeros((6, 5))
    used = set()
    for step, gradient in enumerate(gradients, start=1):
        rows = np.arange(6)[schedule[(step - 1) // 2]]
        if step % 2 and step > 1:
            gone = [row for row in used if row not in rows]
            m[gone], v[gone] = 0, 0  # who is selected again begins anew
        used = set(rows.tolist())
        g = np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.cast(gradient, dtype), "float32")))[rows]
        m[rows] += 0.1 * (g - m[rows])
        v[rows] += 0.001 * (g.astype("float64") ** 2 - v[rows])
        w[rows] -= 0.01 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step) * m[rows] / (np.sqrt(v[rows]) + 1e-7)
    assert int(optimizer.iterations) == 8
    np.testing.assert_allclose(numpy_of(variable).astype("float32"), w, rtol=1e-4 if dtype == "float32" else 2e-2)


def test_another_selection_keeps_state_of_rows_and_columns_and_behind_a_loss_scale():
    variable = keras.Variable(start(), name="w")
    optimizer = ft.SelectiveOptimizer(K.LossScaleOptimizer(K.Adafactor(0.1), 2.0), [(variable, np.s_[:4, :4])])
    optimizer.build([variable])
    for slot in slots_of(optimizer):
        slot.variable.assign(1 + np.arange(numpy_of(slot.variable).size).reshape(tuple(slot.variable.shape)))
    optimizer.iterations.assign(2)
    new = optimizer.reselected([(variable, np.s_[1:6, [0, 3]])])
    old, found = ({slot.axes: numpy_of(slot.variable) for slot in slots_of(o)} for o in (optimizer, new))
    assert old.keys() == {(0,), (1,), (0, 1)} and all(value.all() for value in old.values())
    np.testing.assert_array_equal(found[0,], [*old[0,][1:], 0, 0])
    np.testing.assert_array_equal(found[1,], old[1,][[0, 3]])
    np.testing.assert_array_equal(found[0, 1][:3], old[0, 1][1:][:, [0, 3]])
    assert not found[0, 1][3:].any() and int(new.iterations) == 2


def test_bad_input():
    variable, other = keras.Variable(start(), name="a"), keras.Variable(start(), name="b")
    used = K.Adam()
    used.build([variable])
    built = ft.SelectiveOptimizer(K.Adam(), [(variable, np.s_[1])])
    built.build([variable])
    ones = keras.ops.ones((6, 5))
    cases = {
        "Keras optimizer": lambda: ft.SelectiveOptimizer("adam", [(variable, 0)]),
        "used already": lambda: ft.SelectiveOptimizer(used, [(variable, 0)]),
        "Expected a Selection": lambda: ft.SelectiveOptimizer(K.Adam(), "kernel"),
        "none of the variables": lambda: ft.SelectiveOptimizer(K.Adam(), [(variable, 0)]).build([other]),
        "several of the variables": lambda: ft.SelectiveOptimizer(K.Adam(), {"a": 0}).build([variable, variable]),
        "Nothing is selected": lambda: ft.SelectiveOptimizer(K.Adam(), {"a": np.s_[1:1]}).build([variable]),
        "out of range": lambda: ft.SelectiveOptimizer(K.Adam(), {"a": 9}).build([variable]),
        "other variables": lambda: built.apply([ones], [other]),
        "gradient of shape": lambda: built.apply([keras.ops.ones((5, 6))], [variable]),
        "2 gradients": lambda: built.apply([ones, ones], [variable]),
        "not trainable": lambda: ft.SelectiveOptimizer(K.Adam(), {"c": 0}).build(
            [keras.Variable(start(), name="c", trainable=False)]
        ),
    }
    for message, act in cases.items():
        with pytest.raises(ft.FinetoothError, match=message):
            act()
    assert not bits.differing(numpy_of(variable), start()).any()


if NATIVE == "tensorflow":
    import tensorflow as tf

    def test_two_devices_train_as_one():
        program = Path(__file__).parents[1] / "stories" / "two_devices.py"
        done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]

    @pytest.mark.parametrize("jit", [False, True])
    def test_in_a_compiled_loop(jit):
        table, bias = tf.Variable(start()), tf.Variable(np.zeros(5, "float32"))
        optimizer = ft.SelectiveOptimizer(K.AdamW(0.1), [(table, np.s_[[3, 1]]), (bias, np.s_[2:])])
        optimizer.build([table, bias])
        tokens = tf.constant([3, 3, 1, 0])

        @tf.function(jit_compile=jit)
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((tf.gather(table, tokens) + bias) ** 2)
            optimizer.apply(tape.gradient(loss, [table, bias]), [table, bias])
            return loss

        first, *_, last = (float(step()) for _ in range(8))
        assert last < first
        moved = bits.differing(table.numpy(), start()).any(axis=1)
        assert moved.tolist() == [False, True, False, True, False, False] and (bias.numpy()[:2] == 0).all()


if NATIVE == "torch":
    import torch

    def test_in_a_torch_loop():
        table = bare(start())
        optimizer = ft.SelectiveOptimizer(K.AdamW(0.1), [(table, np.s_[[3, 1]])])
        tokens = keras.ops.convert_to_tensor([3, 3, 1, 0])
        for _ in range(3):
            table.grad = None
            torch.nn.functional.embedding(tokens, table, sparse=True).square().sum().backward()
            optimizer.apply([table.grad], [table])
        moved = bits.differing(numpy_of(table), start()).any(axis=1)
        assert moved.tolist() == [False, True, False, True, False, False]
