"""LazyOptimizer: compared with Keras where every row is used, and with lazy Adam written in NumPy where not."""

import keras
import numpy as np
import pytest
from natives import NATIVE, numpy_of, sparse

import finetooth as ft
from finetooth.regions import bits

K = keras.optimizers
ELEMENTWISE = {
    "SGD": lambda: K.SGD(0.1),
    "SGD, momentum": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: K.Adam(0.1),
    "Adam, amsgrad": lambda: K.Adam(0.1, amsgrad=True),
    "AdamW": lambda: K.AdamW(0.1, weight_decay=0.1),
    "RMSprop": lambda: K.RMSprop(0.1, momentum=0.5, centered=True),
    "Adagrad": lambda: K.Adagrad(0.1),
    "Adadelta": lambda: K.Adadelta(0.5),
    "Adamax": lambda: K.Adamax(0.1),
    "Nadam": lambda: K.Nadam(0.1),
    "Ftrl": lambda: K.Ftrl(0.1),
    "Lion": lambda: K.Lion(0.1),
    "ScheduleFreeAdamW": lambda: K.ScheduleFreeAdamW(0.1),
    "clipnorm": lambda: K.Adam(0.1, clipnorm=0.5),
    "clipvalue": lambda: K.Adam(0.1, clipvalue=0.1),
    "global clip": lambda: K.SGD(0.1, global_clipnorm=0.5),
    "schedule": lambda: K.SGD(K.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "loss scale": lambda: K.SGD(0.1, loss_scale_factor=8.0),
}
SHAPE = (6, 5)


def table(seed=0):
    return np.random.default_rng(seed).normal(size=SHAPE).astype("float32")


def dense_of(indices, rows):
    dense = np.zeros(SHAPE, "float32")
    np.add.at(dense, indices, rows)
    return keras.ops.convert_to_tensor(dense)


def state_of(optimizer):
    return [numpy_of(v) for v in optimizer.variables if tuple(v.shape) == SHAPE]


@pytest.mark.parametrize("name", [name for name in ELEMENTWISE if name != "ScheduleFreeAdamW"])
def test_where_every_row_is_used_it_is_the_inner_optimizer(name):
    rng = np.random.default_rng(1)
    lazy, plain = keras.Variable(table()), keras.Variable(table())
    bias, plain_bias = keras.Variable(np.ones(3, "float32")), keras.Variable(np.ones(3, "float32"))
    optimizer, inner = ft.LazyOptimizer(ELEMENTWISE[name]()), ELEMENTWISE[name]()
    for _ in range(4):
        indices = rng.permutation([0, 1, 2, 3, 4, 5, 2, 2])
        rows = rng.normal(size=(8, 5)).astype("float32")
        of_bias = keras.ops.convert_to_tensor(rng.normal(size=3).astype("float32"))
        optimizer.apply([sparse(indices, rows, SHAPE), of_bias], [lazy, bias])
        inner.apply([dense_of(indices, rows), of_bias], [plain, plain_bias])
    np.testing.assert_allclose(numpy_of(lazy), numpy_of(plain), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(numpy_of(bias), numpy_of(plain_bias), rtol=2e-5, atol=2e-6)
    assert int(optimizer.iterations) == 4


# Tables and the rows that batches use: one row of several, tables of one row, of one column, of one number.
TABLES = {
    (6, 5): [1, 4],
    (6, 4): [3],
    (1, 5): [0],
    (6, 1): [0, 2, 5],
    (5, 1): [2],
    (1, 1): [0],
    (6,): [1, 4],
    (4,): [2],
    (1,): [0],
    (6, 2, 3): [0, 5],
    (4, 1, 2): [3],
}


@pytest.mark.parametrize("name", [name for name in ELEMENTWISE if name != "ScheduleFreeAdamW"])
def test_tables_of_any_shape(name):
    """Oracle: the inner optimizer on plain variables that hold the used rows and nothing else."""
    rng = np.random.default_rng(4)
    starts = [rng.normal(size=shape).astype("float32") for shape in TABLES]
    lazy = [keras.Variable(start) for start in starts]
    plain = [keras.Variable(start[rows]) for start, rows in zip(starts, TABLES.values())]
    optimizer, inner = ft.LazyOptimizer(ELEMENTWISE[name]()), ELEMENTWISE[name]()
    for _ in range(3):
        gradients = [rng.normal(size=variable.shape).astype("float32") for variable in plain]
        optimizer.apply([sparse(rows, g, shape) for g, (shape, rows) in zip(gradients, TABLES.items())], lazy)
        inner.apply([keras.ops.convert_to_tensor(g) for g in gradients], plain)
    for table_, expected, start, rows in zip(lazy, plain, starts, TABLES.values()):
        after = numpy_of(table_)
        np.testing.assert_allclose(after[rows], numpy_of(expected), rtol=2e-5, atol=2e-6)
        others = np.delete(np.arange(len(start)), rows)
        assert (after[rows] != start[rows]).any() and not bits.differing(after, start)[others].any()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_rows_that_were_not_used_keep_their_bits_and_their_state(name):
    variable = keras.Variable(table())
    optimizer = ft.LazyOptimizer(ELEMENTWISE[name]())
    optimizer.apply([sparse([0, 1, 2, 3, 4, 5], table(1), SHAPE)], [variable])
    before, states = numpy_of(variable), state_of(optimizer)
    optimizer.apply([sparse([4, 1, 4], table(2)[:3], SHAPE)], [variable])
    assert bits.differing(numpy_of(variable), before).any(axis=1).tolist() == [False, True, False, False, True, False]
    for old, new in zip(states, state_of(optimizer)):
        assert not bits.differing(old, new)[[0, 2, 3, 5]].any()


def test_lazy_adam_in_numpy():
    rng = np.random.default_rng(2)
    w, m, v = table().astype("float64"), np.zeros(SHAPE), np.zeros(SHAPE)
    variable = keras.Variable(table())
    optimizer = ft.LazyOptimizer(K.Adam(0.01))
    for step in range(1, 30):
        indices = rng.integers(0, 6, size=rng.integers(1, 6))
        rows = rng.normal(size=(len(indices), 5)).astype("float32")
        optimizer.apply([sparse(indices, rows, SHAPE)], [variable])
        used, g = np.unique(indices), numpy_of(dense_of(indices, rows)).astype("float64")
        m[used] += 0.1 * (g[used] - m[used])
        v[used] += 0.001 * (g[used] ** 2 - v[used])
        rate = 0.01 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        w[used] -= rate * m[used] / (np.sqrt(v[used]) + 1e-7)
    np.testing.assert_allclose(numpy_of(variable), w, rtol=1e-4, atol=1e-5)


def test_schedule_free_adamw_in_numpy():
    """Keras' own, on TensorFlow and PyTorch, takes the momentum after the step for the one before it, by aliasing."""
    rng = np.random.default_rng(3)
    y, v = table().astype("float64"), np.zeros(SHAPE)
    z = y.copy()
    variable = keras.Variable(table())
    optimizer = ft.LazyOptimizer(K.ScheduleFreeAdamW(0.01))
    for step in range(1, 10):
        g = rng.normal(size=SHAPE).astype("float32")
        optimizer.apply([sparse(np.arange(6), g, SHAPE)], [variable])
        x = (y - 0.1 * z) / 0.9
        v += 0.001 * (g.astype("float64") ** 2 - v)
        z = z - 0.01 * g / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        x = x + (z - x) / step
        y = 0.1 * z + 0.9 * x
    np.testing.assert_allclose(numpy_of(variable), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inner", [K.Lamb, K.Muon, K.Adafactor])
def test_rules_that_are_not_elementwise_are_refused(inner):
    with pytest.raises(ft.TuningError, match="not elementwise"):
        ft.LazyOptimizer(inner())


def test_a_rule_of_ones_own():
    class Signs(K.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, learning_rate * keras.ops.sign(gradient))

    class Normed(Signs):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient / keras.ops.norm(gradient) - 0.3, variable, learning_rate)

    variable = keras.Variable(table())
    optimizer = ft.LazyOptimizer(Signs(learning_rate=1.0))
    optimizer.apply([sparse([2], np.ones((1, 5), "float32"), SHAPE)], [variable])
    np.testing.assert_allclose(numpy_of(variable) - table(), [[0] * 5, [0] * 5, [-1] * 5, *[[0] * 5] * 3], atol=1e-6)
    with pytest.raises(ft.TuningError, match="not elementwise"):
        ft.LazyOptimizer(Normed(learning_rate=1.0))


def test_weight_decay_leaves_out_what_the_inner_optimizer_leaves_out():
    variables = [keras.Variable(table(), name=name) for name in ("decayed", "spared")]
    inner = K.AdamW(0.1, weight_decay=0.5)
    inner.exclude_from_weight_decay(var_names=["spared"])
    optimizer = ft.LazyOptimizer(inner)
    gradient = sparse([1], np.zeros((1, 5), "float32"), SHAPE)
    optimizer.apply([gradient, gradient], variables)
    decayed, spared = (numpy_of(v) for v in variables)
    np.testing.assert_allclose(decayed[1], table()[1] * 0.95, rtol=1e-5)
    np.testing.assert_allclose(spared, table(), rtol=1e-6)


def test_state_is_saved_and_loaded():
    def optimizer():
        return ft.LazyOptimizer(K.Adam(0.1))

    first, second = optimizer(), optimizer()
    one, two = keras.Variable(table()), keras.Variable(table())
    gradients = [sparse([1, 4], table(seed)[:2], SHAPE) for seed in (1, 2)]
    first.apply([gradients[0]], [one])
    store = {}
    first.save_own_variables(store)
    two.assign(one)
    second.build([two])
    second.load_own_variables(store)
    first.apply([gradients[1]], [one])
    second.apply([gradients[1]], [two])
    assert not bits.differing(numpy_of(one), numpy_of(two)).any()
    with pytest.raises(ft.TuningError, match="does not fit"):
        second.load_own_variables({"0": store["0"]})
    again = keras.optimizers.deserialize(keras.optimizers.serialize(first))
    assert isinstance(again, ft.LazyOptimizer) and float(again.learning_rate) == float(first.learning_rate)


def test_saved_before_the_first_step(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="d")])
    model.compile(ft.LazyOptimizer(K.SGD(0.1)), "mse", run_eagerly=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        one.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    assert int(loaded.optimizer.iterations) == 1
    assert not bits.differing(numpy_of(model.layers[0].kernel), numpy_of(loaded.layers[0].kernel)).any()


def test_variables_without_a_gradient_stay():
    variable, other = keras.Variable(table()), keras.Variable(np.ones(3, "float32"))
    optimizer = ft.LazyOptimizer(K.Adam(0.1))
    optimizer.apply([sparse([1], table()[:1], SHAPE), None], [variable, other])
    assert int(optimizer.iterations) == 1 and (numpy_of(other) == 1).all()
    with pytest.raises(ValueError, match="No gradients"):
        optimizer.apply([None, None], [variable, other])


def test_bad_input():
    constrained = keras.Variable(table())
    constrained.constraint = keras.constraints.NonNeg()
    cases = {
        "use_ema": lambda: ft.LazyOptimizer(K.Adam(use_ema=True)),
        "gradient_accumulation_steps": lambda: ft.LazyOptimizer(K.Adam(gradient_accumulation_steps=2)),
        "wraps another": lambda: ft.LazyOptimizer(K.LossScaleOptimizer(K.Adam())),
        "constraint": lambda: ft.LazyOptimizer(K.Adam()).build([constrained]),
        "Keras optimizer": lambda: ft.LazyOptimizer(None),
    }
    for message, act in cases.items():
        with pytest.raises(ft.TuningError, match=message):
            act()


if NATIVE == "tensorflow":
    import tensorflow as tf

    @pytest.mark.parametrize("jit", [False, True])
    def test_batches_of_any_size_in_one_trace(jit):
        variable, expected = tf.Variable(table()), keras.Variable(table())
        optimizer, eager = ft.LazyOptimizer(K.Adam(0.1)), ft.LazyOptimizer(K.Adam(0.1))
        optimizer.build([variable])
        traces = []

        @tf.function(jit_compile=jit, input_signature=None if jit else [tf.TensorSpec([None], tf.int32)])
        def step(tokens):
            traces.append(1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(variable, tokens) ** 2)
            optimizer.apply([tape.gradient(loss, variable)], [variable])

        for tokens in ([1, 2, 1], [5, 5, 5], [0, 3, 4]) if jit else ([1, 2, 1], [5], [0, 3, 3, 3]):
            rows = 2 * numpy_of(expected)[tokens]
            eager.apply([sparse(tokens, rows, SHAPE)], [expected])
            step(tf.constant(tokens, tf.int32))
            np.testing.assert_allclose(variable.numpy(), numpy_of(expected), rtol=1e-5, atol=1e-6)
        assert len(traces) == 1

    @pytest.mark.parametrize("inner", ["AdamW", "SGD, momentum", "Ftrl"])
    def test_in_fit(inner):
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(50, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(2),
            ]
        )
        tokens = np.random.default_rng(0).integers(0, 20, (45, 3))
        before = numpy_of(model.layers[0].embeddings)
        model.compile(ft.LazyOptimizer(ELEMENTWISE[inner]()), "mse")
        model.fit(tokens, np.ones((45, 2)), batch_size=10, epochs=2, verbose=0)
        moved = bits.differing(numpy_of(model.layers[0].embeddings), before).any(axis=1)
        np.testing.assert_array_equal(np.flatnonzero(moved), np.unique(tokens))


if NATIVE == "jax":
    import jax

    def test_compiled_with_its_state_donated():
        variable, eager_variable = keras.Variable(table()), keras.Variable(table())
        optimizer, eager = ft.LazyOptimizer(K.Adam(0.1)), ft.LazyOptimizer(K.Adam(0.1))
        optimizer.build([variable])

        def step(state, value, rows):
            (value,), state = optimizer.stateless_apply(state, [sparse([1, 4, 1], rows, SHAPE)], [value])
            return state, value

        compiled = jax.jit(step, donate_argnums=(0, 1))
        state, value = [jax.numpy.array(v.value) for v in optimizer.variables], jax.numpy.array(table())
        address = value.unsafe_buffer_pointer()
        for seed in range(3):
            rows = table(seed)[:3]
            state, value = compiled(state, value, rows)
            eager.apply([sparse([1, 4, 1], rows, SHAPE)], [eager_variable])
        np.testing.assert_allclose(value, numpy_of(eager_variable), rtol=1e-5, atol=1e-6)
        assert value.unsafe_buffer_pointer() == address


if NATIVE == "torch":
    import torch

    def test_in_a_torch_loop():
        variable = keras.Variable(table())
        optimizer = ft.LazyOptimizer(K.Adam(0.1))
        tokens = keras.ops.convert_to_tensor([3, 3, 1])
        for _ in range(3):
            torch.nn.functional.embedding(tokens, variable.value, sparse=True).square().sum().backward()
            optimizer.apply([variable.value.grad], [variable])
            variable.value.grad = None
        moved = bits.differing(numpy_of(variable), table()).any(axis=1)
        assert moved.tolist() == [False, True, False, True, False, False]
