"""Parts in the programs of each backend: compiled functions, buffers, donated arrays. Each test is for one backend."""

import types

import keras
import numpy as np
import pytest
from natives import NATIVE, bare, numpy_of

import finetooth as ft
from finetooth.regions import bits

START = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")
INDICES = {
    "rows": np.s_[1:3],
    "scattered rows": np.s_[[0, 4, 5]],
    "columns": np.s_[:, [0, 3, 4]],
    "block": np.s_[1:4, 2:],
    "points": np.eye(6, 5, dtype=bool),
}

if NATIVE == "tensorflow":
    import tensorflow as tf

    @pytest.mark.parametrize("jit", [False, True])
    @pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
    def test_inside_a_function(index, jit):
        variable = tf.Variable(START)
        part = ft.Part(variable, index)
        traces = []

        @tf.function(jit_compile=jit)
        def step(x):
            traces.append(1)
            before = tf.reduce_sum(variable)
            part.assign_add(x)
            return before, part.read(), tf.reduce_sum(variable)

        expected = START.copy()
        for x in (1.0, 2.0):
            before, read, after = step(tf.constant(x))
            np.testing.assert_allclose(before, expected.sum(), rtol=1e-5)
            expected[index] += x
            np.testing.assert_array_equal(read, expected[index])
            np.testing.assert_allclose(after, expected.sum(), rtol=1e-5)
            assert not bits.differing(variable.numpy(), expected).any()
        assert len(traces) == 1

    @pytest.mark.parametrize("jit", [False, True])
    def test_training_inside_a_function(jit):
        variable = tf.Variable(START)
        part = ft.Part(variable, np.s_[:, 1])
        x = tf.constant(START.T)
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([part.variable])

        @tf.function(jit_compile=jit)
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.matmul(x, part.merged()) ** 2)
            gradient = tape.gradient(loss, part.variable)
            optimizer.apply([gradient], [part.variable])
            return loss

        first, *_, last = (float(step()) for _ in range(10))
        assert last < first and not bits.differing(variable.numpy(), START).any()
        part.assign(part.variable)
        assert bits.differing(variable.numpy(), START).any(axis=0).tolist() == [False, True, False, False, False]

    def test_a_part_made_inside_a_function():
        variable = tf.Variable(START)

        @tf.function
        def step():
            ft.Part(variable, np.s_[[4, 1]]).assign(0.0)

        step()
        assert (variable.numpy()[[1, 4]] == 0).all() and (variable.numpy()[[0, 2, 3, 5]] != 0).all()

    def part_write(variable):
        part = ft.Part(variable, np.s_[[1, 5]])
        return lambda: part.assign(1.0)

    def test_reads_do_not_copy_after_a_write():
        """TensorFlow copies a variable at each read once it was written in part, unless told not to."""
        variable = tf.Variable(np.zeros((64, 64), "float32"))
        rows = tf.IndexedSlices(tf.ones((2, 64)), tf.constant([1, 5]))
        for write, shared in ((lambda: variable.scatter_update(rows), False), (part_write(variable), True)):
            write()
            first, second = (np.asarray(memoryview(variable.read_value())) for _ in range(2))  # both held
            assert np.shares_memory(first, second) == shared

    def test_what_was_read_before_a_write_keeps_its_values():
        variable = tf.Variable(START)
        held = variable.read_value()
        ft.Part(variable, np.s_[[1, 5]]).assign(0.0)
        held_too = variable.read_value()
        ft.Part(variable, np.s_[[1, 5]]).assign(1.0)
        np.testing.assert_array_equal(held, START)
        assert (held_too.numpy()[[1, 5]] == 0).all()

    def test_in_a_mirrored_scope():
        cpus = tf.config.list_logical_devices("CPU")
        with tf.distribute.MirroredStrategy([cpus[0].name]).scope():
            variable = tf.Variable(START)
        ft.Part(variable, np.s_[:, [0, 2]]).assign(0.0)
        expected = START.copy()
        expected[:, [0, 2]] = 0
        np.testing.assert_array_equal(variable.numpy(), expected)


if NATIVE == "torch":
    import torch

    @pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
    def test_buffers_and_parameters_are_written_where_they_are(index):
        module = torch.nn.BatchNorm1d(3)
        module.register_buffer("table", torch.tensor(START))
        address = module.table.data_ptr()
        ft.Part(module.table, index).assign(2)
        expected = START.copy()
        expected[index] = 2
        assert not bits.differing(module.table.numpy(), expected).any() and module.table.data_ptr() == address
        with pytest.raises(ft.PartError, match="not trainable"):
            ft.Part(module.table, index).variable  # noqa: B018

    def test_a_parameter_trains_with_torch_optim():
        parameter = bare(START)
        part = ft.Part(parameter, np.s_[:, 1])
        optimizer = torch.optim.AdamW([part.variable], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (keras.ops.convert_to_tensor(START.T) @ part.merged()).square().sum().backward()
            optimizer.step()
        assert parameter.grad is None
        part.assign(part.variable)
        assert bits.differing(numpy_of(parameter), START).any(axis=0).tolist() == [False, True, False, False, False]

    def test_a_write_that_autograd_must_know_of():
        parameter = bare(START)
        loss = (parameter**2).sum()
        ft.Part(parameter, np.s_[1]).assign(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_what_is_computed_is_no_variable():
        with pytest.raises(ft.PartError, match="Expected a keras.Variable"):
            ft.Part(bare(START) * 2, np.s_[0])

    def test_a_parameter_whose_data_was_replaced():
        parameter = bare(START)
        part = ft.Part(parameter, np.s_[0])
        parameter.data = torch.zeros(3, 3)
        with pytest.raises(ft.PartError, match="has become"):
            part.assign(0)


if NATIVE == "jax":
    import jax
    import jax.numpy as jnp

    from finetooth.backends.jax import writes

    @pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
    def test_a_donated_array_is_written_where_it_is(index):
        step = jax.jit(lambda array, x: ft.Part(array, index).assign_add(x), donate_argnums=0)
        array = jnp.array(START)
        address = array.unsafe_buffer_pointer()
        array = step(array, 2.0)
        assert array.unsafe_buffer_pointer() == address
        expected = START.copy()
        expected[index] += 2
        assert not bits.differing(np.asarray(array), expected).any()

    def test_a_variable_whose_array_nobody_holds_is_written_where_it_is():
        variable = keras.Variable(START)
        part = ft.Part(variable, np.s_[[4, 1]])
        part.assign(0)
        address = variable.value.unsafe_buffer_pointer()
        part.assign(1)
        assert variable.value.unsafe_buffer_pointer() == address

    HOLDERS = {
        "a name": lambda array: array,
        "a list": lambda array: [array],
        "a dictionary": lambda array: {"array": array},
        "an attribute": lambda array: types.SimpleNamespace(array=array),
        "a function": lambda array: lambda: array,
        "a generator": lambda array: (array for _ in range(1)),
        "another variable": lambda array: keras.Variable(array),
        "a view of NumPy": np.asarray,
        "a buffer": memoryview,
    }

    @pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
    @pytest.mark.parametrize("holder", HOLDERS)
    def test_an_array_that_something_holds_is_not_taken(holder, index):
        variable = keras.Variable(START)
        part = ft.Part(variable, index)
        part.assign(0)  # now the array is one of JAX's own, not the memory of START
        expected = numpy_of(variable)
        held = HOLDERS[holder](variable.value)
        part.assign(1)
        while not isinstance(held, (jax.Array, np.ndarray, keras.Variable)):
            if isinstance(held, (memoryview, list)):
                held = np.asarray(held) if isinstance(held, memoryview) else held[0]
            elif isinstance(held, dict):
                held = held["array"]
            else:
                held = held.array if hasattr(held, "array") else held() if callable(held) else next(held)
        assert not bits.differing(numpy_of(held), expected).any()
        assert (numpy_of(part.read()) == 1).all()

    def test_whether_others_hold_an_array_can_be_told_from_whether_nobody_does():
        assert writes.ALONE is not None

    def test_nothing_is_taken_where_that_cannot_be_told(monkeypatch):
        monkeypatch.setattr(writes, "ALONE", None)
        variable = keras.Variable(START)
        part = ft.Part(variable, np.s_[[4, 1]])
        part.assign(0)
        address = variable.value.unsafe_buffer_pointer()
        pointer = variable.value
        part.assign(1)
        assert pointer.unsafe_buffer_pointer() == address != variable.value.unsafe_buffer_pointer()

    KINDS = {
        "an integer": lambda i: i,
        "a range": lambda i: np.s_[i : i + 2],
        "a block": lambda i: np.s_[i : i + 2, i : i + 3],
        "rows": lambda i: [i, i + 3],
        "rows and a range": lambda i: np.s_[[i, i + 3], i : i + 2],
        "rows and columns": lambda i: np.s_[[i, i + 3], [i, i + 2]],
        "points": lambda i: np.eye(6, 5, k=i - 3, dtype=bool) | np.eye(6, 5, k=i + 2, dtype=bool),
    }

    @pytest.mark.parametrize("kind", KINDS)
    def test_other_elements_of_the_same_number_do_not_compile_again(kind):
        """Indices are arguments of what is compiled, in writes and in reads."""
        variable, compiled = keras.Variable(START), []

        def step(i):
            part = ft.Part(variable, KINDS[kind](i))
            part.assign(1.0)
            part.assign_add(part.read())
            part.variable.assign_add(part.read())
            part.assign(part.variable)
            part.assign(2.0)

        def listen(event, duration, **_):
            if event.startswith("/jax/core/compile/"):
                compiled.append(event)

        step(0)
        step(0)
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            step(1)
            step(2)
            again = list(compiled)
            jax.jit(lambda x: x + 1)(1.0)  # something new, to see that the listener hears
        finally:
            jax.monitoring.clear_event_listeners()
        assert not again and compiled

    @pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
    def test_gradients_through_a_written_array(index):
        """For what is written, and for what is left of the array."""
        value = np.ones_like(START[index])

        def loss(array, value):
            return (ft.Part(array, index).assign(value) ** 2).sum()

        of_array, of_value = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.array(START), jnp.array(value))
        expected = 2 * START
        expected[index] = 0
        np.testing.assert_allclose(of_array, expected, rtol=1e-6)
        np.testing.assert_allclose(of_value, 2 * value)

    def test_what_is_read_and_written_whole_is_nobody_elses_array():
        """A program that donates the arrays of two variables must find two."""
        variable = keras.Variable(START)
        part = ft.Part(variable, np.s_[...])
        given = jnp.array(START)
        part.assign(given)
        arrays = [variable.value, part.read(), part.variable.value, given]
        assert len({array.unsafe_buffer_pointer() for array in arrays}) == 4

    def test_gradients_by_jax_itself():
        part = ft.Part(jnp.array(START), np.s_[:, 1])
        gradient = jax.jit(jax.grad(lambda value: (part.merged(value) ** 2).sum()))(part.read())
        np.testing.assert_allclose(gradient, 2 * START[:, 1])

    def test_in_a_stateless_scope():
        variable = keras.Variable(START)
        with keras.StatelessScope(state_mapping=[(variable, jnp.zeros((6, 5)))]) as scope:
            ft.Part(variable, np.s_[1]).assign_add(3)
            inside = scope.get_current_value(variable)
        np.testing.assert_array_equal(inside.sum(axis=1), [0, 15, 0, 0, 0, 0])
        assert not bits.differing(numpy_of(variable), START).any()
