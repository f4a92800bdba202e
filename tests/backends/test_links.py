"""A tuned variable holds its merged values, whoever reads it and whenever; the end of a tuning loses nothing."""

import gc
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import finetooth as ft

BACKEND = keras.backend.backend()
L = keras.layers
X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 3)).astype("float32")
WHERE = {"grid": "a/kernel[2:5, 3:9]", "rows": "a/kernel[[1, 4, 6]]", "columns": "a/kernel[:, [0, 7]]"}


def network() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), L.Dense(12, "tanh", name="a"), L.Dense(3, name="b")])


def train(model: keras.Model, **how) -> None:
    model.compile(keras.optimizers.Adam(0.05), "mse", **how)
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)


def native(variable: keras.Variable) -> np.ndarray:
    """What the backend's own variable holds, read past Keras."""
    value = variable._value
    return np.array(value.detach() if BACKEND == "torch" else value)


def raw(model: keras.Model) -> list[bytes]:
    return [np.array(v).tobytes() for v in model.variables]


@pytest.mark.parametrize("end", ["finish", "revert"])
def test_predictions_are_fresh_where_objects_are_frozen_for_the_garbage_collector(end):
    model = network()
    model.predict(X, verbose=0)
    gc.freeze()
    try:
        tuning = ft.tune(model, "a/kernel[:, :4]")
        train(model)
        model.predict(X, verbose=0)
        getattr(tuning, end)()
        model.set_weights([0 * w for w in model.get_weights()])
        assert not model.predict(X, verbose=0).any()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("part_way", [False, True], ids=["never built", "half made"])
def test_models_that_are_half_made_are_nobodys_concern(part_way):
    class Late(keras.Model):
        pass

    others = [keras.Model.__new__(keras.Model), Late.__new__(Late)]
    if part_way:
        others.append(Late())
    model = network()
    tuning = ft.tune(model, "a/kernel[:, :4]")
    train(model)
    trained = model.get_weights()
    tuning.finish()
    assert all(np.array_equal(a, b) for a, b in zip(trained, model.get_weights()))
    assert len(others) > 1


class Refusing(keras.Model):
    """A model whose owner lets nothing be set on it from some time on."""

    refuses = False

    def __setattr__(self, name, value):
        if self.refuses:
            raise RuntimeError("nothing may be set")
        super().__setattr__(name, value)


@pytest.mark.parametrize("end", ["finish", "exit", "revert"])
def test_a_failure_at_the_end_loses_nothing(end):
    inputs = keras.Input((8,))
    model = Refusing(inputs, L.Dense(3, name="b")(L.Dense(12, name="a")(inputs)))
    before = model.get_weights()
    tuning = ft.tune(model, "a/kernel[:, :4]")
    train(model)
    trained = model.get_weights()
    assert not np.array_equal(before[0], trained[0])
    model.__dict__["refuses"] = True
    with pytest.raises(RuntimeError, match="nothing may be set"):
        tuning.__exit__(None, None, None) if end == "exit" else getattr(tuning, end)()
    model.__dict__["refuses"] = False
    wanted = before if end == "revert" else trained
    assert all(np.array_equal(a, b) for a, b in zip(wanted, model.get_weights()))
    tuning.finish()  # nothing more to do
    assert all(np.array_equal(a, b) for a, b in zip(wanted, model.get_weights()))
    np.testing.assert_array_equal(tuning.patch["a/kernel"].new, wanted[0][:, :4])
    assert tuning.verify() and not tuning.active
    if end != "revert":
        tuning.revert()
        assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights()))


def test_after_a_revert_there_is_nothing_to_apply():
    model = network()
    before = raw(model)
    tuning = ft.tune(model, "a/kernel[:, :4]", "b/bias")
    train(model)
    tuning.revert()
    assert raw(model)[: len(before)] == before
    assert [change.moved for _, change in tuning.patch.items()] == [0, 0]
    tuning.patch.apply(model)
    assert raw(model)[: len(before)] == before


def test_a_model_that_shares_a_layer_trains_by_the_rules_of_the_time():
    model = network()
    shared = keras.Sequential([keras.Input((8,)), model.get_layer("a"), L.Dense(3, name="head")])
    shared.compile(keras.optimizers.SGD(0.1), "mse")
    shared.fit(X, Y, verbose=0)  # compiled before anything is frozen
    kernel = model.get_layer("a").kernel
    tuning = ft.tune(model, "a/kernel[:, :4]")
    before = np.array(kernel)
    shared.compile(keras.optimizers.SGD(0.1), "mse") if BACKEND != "tensorflow" else None
    shared.compile(keras.optimizers.SGD(0.1), "mse")
    shared.fit(X, Y, verbose=0)
    during = np.array(kernel)
    np.testing.assert_array_equal(during[:, 4:], before[:, 4:])
    assert (during[:, :4] != before[:, :4]).all()
    tuning.finish()
    shared.compile(keras.optimizers.SGD(0.1), "mse")
    shared.fit(X, Y, verbose=0)
    assert (np.array(kernel) != during).all()


class Between(keras.callbacks.Callback):
    """Gives the model other weights after an epoch."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.model.set_weights(self.weights)


@pytest.mark.parametrize("within", [True, False], ids=["in fit", "between"])
def test_a_constraint_sees_the_frozen_weights_that_are_there_now(within):
    def constrained() -> keras.Model:
        keras.utils.set_random_seed(3)
        dense = L.Dense(12, name="a", kernel_constraint=keras.constraints.MaxNorm(0.3))
        return keras.Sequential([keras.Input((8,)), dense, L.Dense(3, name="b")])

    other = [np.random.default_rng(5).normal(size=w.shape).astype("float32") for w in constrained().get_weights()]
    results = []
    for sooner in (True, False):
        model = constrained()
        if sooner:
            model.set_weights(other)
        with ft.tune(model, "a/kernel[:3]"):
            model.compile(keras.optimizers.SGD(0.01), "mse")
            if not sooner:
                callbacks = [Between(other)] if within else []
                model.fit(X, Y, batch_size=16, epochs=2 if within else 1, verbose=0, callbacks=callbacks)
                if not within:
                    model.set_weights(other)
            if sooner or not within:
                model.fit(X, Y, batch_size=16, verbose=0)
        results.append(model.get_weights())
    for a, b in zip(*results):
        np.testing.assert_allclose(a, b, rtol=1e-6)


if BACKEND == "tensorflow":
    import tensorflow as tf

    def test_a_training_step_compiled_before_the_tuning_does_not_move_what_is_frozen():
        model = network()
        shared = keras.Sequential([keras.Input((8,)), model.get_layer("a"), L.Dense(3, name="head")])
        shared.compile(keras.optimizers.SGD(0.1), "mse")
        shared.fit(X, Y, verbose=0)
        kernel, before = model.get_layer("a").kernel, np.array(model.get_layer("a").kernel)
        with ft.tune(model, "a/kernel[:, :4]"):
            try:
                shared.fit(X, Y, verbose=0)  # with an optimizer that was built for other variables
            except (ValueError, KeyError):
                pass
            np.testing.assert_array_equal(np.array(kernel)[:, 4:], before[:, 4:])
        shared.fit(X, Y, verbose=0)
        assert (np.array(kernel)[:, 4:] != before[:, 4:]).all()

    @pytest.mark.parametrize("how", [{}, {"jit_compile": True}, {"run_eagerly": True}], ids=["graph", "xla", "eager"])
    @pytest.mark.parametrize("where", WHERE)
    def test_functions_compiled_at_any_time_read_the_merged_values(where, how):
        model = network()
        inner = tf.function(lambda x: model(x))
        inner(X)
        base = np.array(inner(X))
        tuning = ft.tune(model, WHERE[where])
        train(model, **how)
        during = tf.function(lambda x: model(x))
        expected = np.array(model(X))
        assert np.abs(expected - base).max() > 1e-3
        for function in (inner, during):
            np.testing.assert_allclose(function(X), expected, atol=1e-6)
        np.testing.assert_array_equal(native(model.get_layer("a").kernel), model.get_layer("a").kernel.numpy())
        tuning.revert()
        for function in (inner, during):
            np.testing.assert_allclose(function(X), base, atol=1e-6)
        model.set_weights([0 * w for w in model.get_weights()])
        for function in (inner, during):
            assert not np.array(function(X)).any()

    def test_a_part_follows_whoever_assigns_its_base():
        model = network()
        kernel = model.get_layer("a").kernel
        plain = kernel._value
        with ft.tune(model, "a/kernel[:, :4]"):
            (part,) = model.trainable_variables
            kernel.assign(np.full((8, 12), 2.0))
            assert (np.array(part) == 2).all()
            tf.function(lambda: kernel.assign(tf.ones((8, 12))))()
            assert (np.array(part) == 1).all()
            plain.assign_add(tf.ones((8, 12)))
            assert (np.array(part) == 2).all()
            part.assign(np.full((8, 4), 5.0))
            np.testing.assert_array_equal(plain.numpy()[:, :4], 5)
            np.testing.assert_array_equal(plain.numpy()[:, 4:], 2)
        assert not {"assign", "assign_add", "scatter_update"} & set(plain.__dict__)

    def test_a_raw_operation_on_a_part_is_noticed_when_the_weights_are_taken(tmp_path):
        model = network()
        tuning = ft.tune(model, "a/kernel[:, :4]")
        part = model.trainable_variables[0]._value
        tf.raw_ops.AssignVariableOp(resource=part.handle, value=tf.ones((8, 4)))
        model.save(tmp_path / "model.keras")
        saved = keras.saving.load_model(tmp_path / "model.keras").get_layer("a").get_weights()[0]
        assert (saved[:, :4] == 1).all()
        tf.raw_ops.AssignVariableOp(resource=part.handle, value=2 * tf.ones((8, 4)))
        assert (tuning.patch["a/kernel"].new == 2).all()
        tf.raw_ops.AssignVariableOp(resource=part.handle, value=3 * tf.ones((8, 4)))
        tuning.finish()
        assert (model.get_weights()[0][:, :4] == 3).all() and (tuning.patch["a/kernel"].new == 3).all()

    def test_checkpoints_of_tensorflow_hold_the_merged_values(tmp_path):
        model, other = network(), network()
        untuned = tf.train.Checkpoint(model=network()).write(str(tmp_path / "untuned"))
        tuning = ft.tune(model, "a/kernel[:, :4]")
        train(model)
        trained = model.get_weights()
        path = tf.train.Checkpoint(model=model).write(str(tmp_path / "tuned"))
        train(model)
        assert not np.array_equal(trained[0], model.get_weights()[0])
        tf.train.Checkpoint(model=model).read(path)
        assert all(np.array_equal(a, b) for a, b in zip(trained, model.get_weights()))
        np.testing.assert_array_equal(np.array(model.trainable_variables[0]), trained[0][:, :4])
        tf.train.Checkpoint(model=other).read(path).expect_partial()
        assert all(np.array_equal(a, b) for a, b in zip(trained, other.get_weights()))
        tf.train.Checkpoint(model=model).read(untuned).expect_partial()
        np.testing.assert_array_equal(np.array(model.trainable_variables[0]), model.get_weights()[0][:, :4])
        tuning.finish()

    def address(variable: keras.Variable) -> int:
        return variable._value.read_value()._numpy().__array_interface__["data"][0]

    @pytest.mark.parametrize("clip", [None, 1e6], ids=["free", "clipped"])
    @pytest.mark.parametrize("where", ["[64:128, 64:128]", "[[3, 50, 77]]", "[:, [3, 50, 77]]", "points"])
    def test_a_step_of_a_graph_writes_kernels_where_they_are(where, clip):
        width = 256
        model = keras.Sequential([keras.Input((width,)), *(L.Dense(width, "relu", name=f"d{i}") for i in range(3))])
        mask = np.random.default_rng(1).random((width, width)) < 0.02
        what = [(f"d{i}/kernel", mask) for i in range(3)] if where == "points" else [f"*/kernel{where}"]
        x = np.random.default_rng(0).normal(size=(16, width)).astype("float32")
        with ft.tune(model, ft.select(model, *what)):
            model.compile(keras.optimizers.AdamW(1e-3, global_clipnorm=clip), "mse")
            model.train_on_batch(x, x)
            kernels = [layer.kernel for layer in model.layers]
            start = [address(kernel) for kernel in kernels]
            for _ in range(4):
                model.train_on_batch(x, x)
                assert [address(kernel) for kernel in kernels] == start

    def test_a_step_of_xla_copies_no_kernel():
        width = 64
        model = keras.Sequential([keras.Input((width,)), *(L.Dense(width, "relu", name=f"d{i}") for i in range(3))])
        x = tf.ones((4, width))
        with ft.tune(model, "*/kernel[16:32, 16:32]"):
            optimizer = keras.optimizers.AdamW(1e-3)
            model.compile(optimizer, "mse", jit_compile=True)
            model.train_on_batch(x, x)
            step = tf.function(lambda: model.train_step((x, x)), jit_compile=True)
            step()
            hlo = step.experimental_get_compiler_ir()(stage="optimized_hlo")
        assert "dynamic-update-slice" in hlo
        copies = [line for line in hlo.splitlines() if f"f32[{width},{width}]" in line and " copy(" in line]
        assert not copies

    def test_a_step_traced_outside_of_xla_runs_inside_of_it():
        model = network()
        with ft.tune(model, "a/kernel[[1, 4, 6]]"):
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)

            @tf.function
            def update(gradients):
                optimizer.apply(gradients, model.trainable_variables)

            @tf.function(jit_compile=True)
            def step(x, y):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x) - y))
                update(tape.gradient(loss, [v._value for v in model.trainable_variables]))
                return loss

            update([tf.zeros((3, 12))])  # traced here, for any device
            losses = [float(step(X, Y)) for _ in range(4)]
            assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
            kernel = model.get_layer("a").kernel
            np.testing.assert_array_equal(native(kernel), kernel.numpy())

    def test_values_that_somebody_holds_stay_as_they_were():
        model = network()
        with ft.tune(model, "a/kernel[:, :4]"):
            train(model)
            kernel = model.get_layer("a").kernel
            held = [kernel.value, np.asarray(kernel.value), kernel._value.read_value()]
            before = [np.array(value) for value in held]
            train(model)
            for value, then in zip(held, before):
                np.testing.assert_array_equal(np.array(value), then)

    def test_operations_straight_on_a_variable_give_the_part_its_gradient():
        model = network()
        with ft.tune(model, "a/kernel[:, :4]"):
            kernel, part = model.get_layer("a").kernel, model.trainable_variables[0]._value
            for function in (
                lambda: tf.reduce_sum(tf.square(kernel)),
                lambda: tf.reduce_sum(tf.matmul(tf.ones((1, 8)), kernel) ** 2) ** 0.5,
                lambda: keras.ops.sum(kernel * kernel),
                lambda: tf.reduce_sum(tf.gather(kernel, [2, 3]) ** 2),
            ):
                with tf.GradientTape() as tape:
                    loss = function()
                assert np.abs(np.array(tape.gradient(loss, part))).max() > 0

    @pytest.mark.parametrize("layer_rules", [True, False])
    @pytest.mark.parametrize("where", ["[2:5, 3:9]", "[[1, 4, 6]]"])
    def test_second_derivatives_reach_the_part(where, layer_rules):
        """A gradient penalty, against TensorFlow on a tensor in which the region alone is a variable."""
        model = keras.Sequential([keras.Input((8,)), L.Dense(12, "tanh", name="a"), L.Dense(1, name="b")])
        w, bias, v, c = (tf.constant(value) for value in model.get_weights())
        region = ft.select(model, f"a/kernel{where}")["a/kernel"]

        def penalty(run, x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(run(x))
            return tf.reduce_sum(tf.square(tape.gradient(y, x)))

        mask = tf.constant(region.mask())
        with tf.GradientTape() as tape:
            tape.watch(w)
            x = tf.constant(X)
            expected = penalty(lambda x: tf.tanh(x @ tf.where(mask, w, tf.stop_gradient(w)) + bias) @ v + c, x)
        reference = region.gather(tape.gradient(expected, w).numpy())
        with ft.tune(model, f"a/kernel{where}", layer_rules=layer_rules):
            part = model.trainable_variables[0]._value
            for how in (lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True)):

                @how
                def gradient():
                    with tf.GradientTape() as tape:
                        value = penalty(model, tf.constant(X))
                    return tape.gradient(value, part)

                np.testing.assert_allclose(gradient().numpy(), reference, rtol=2e-5, atol=1e-6)

    def test_tuning_on_two_devices_is_tuning_on_one():
        """A process of its own: devices are set up before anything else."""
        program = Path(__file__).parents[1] / "stories" / "two_devices.py"
        done = subprocess.run([sys.executable, program, "tune"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "frozen elements moved 0" in done.stdout


if BACKEND == "torch":
    import torch

    @pytest.mark.parametrize("layer_rules", [True, False])
    def test_a_backward_of_what_has_changed_since_raises_as_plain_torch_does(layer_rules):
        model = keras.Sequential([keras.Input((8,)), L.Dense(12, "tanh", name="a"), L.Dense(3, name="b")])
        with ft.tune(model, "*/kernel[:, :2]", layer_rules=layer_rules):
            first = torch.sum(model(X) ** 2)
            with torch.no_grad():
                for variable in model.trainable_variables:
                    variable.value.add_(1.0)
            model(X)
            with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
                first.backward()

    @pytest.mark.parametrize("fused", [False, True], ids=["data", "fused"])
    def test_steps_that_autograd_does_not_count_are_seen_by_the_next_read(fused):
        results = []
        for tuned in (False, True):
            model = network()
            model.set_weights([np.full(w.shape, 0.1, w.dtype) for w in model.get_weights()])
            kernel = model.get_layer("a").kernel
            with ft.tune(model, "a/kernel[:, :5]" if tuned else "a/kernel"):
                (trained,) = (v._value for v in model.trainable_variables)
                optimizer = torch.optim.SGD([trained], lr=0.1, fused=fused)
                for _ in range(3):
                    trained.grad = None
                    torch.sum((model(X) - torch.tensor(Y)) ** 2).backward()
                    if fused:
                        optimizer.step()
                    else:
                        trained.data -= 0.1 * trained.grad
                    if not tuned:
                        trained.data[:, 5:] = 0.1
                results.append(np.array(kernel.value.detach()))
        np.testing.assert_allclose(results[0], results[1], rtol=1e-5)

    def test_a_graph_that_is_kept_does_not_disturb_the_next_step():
        model = network()
        with ft.tune(model, "a/kernel[:, :4]"):
            kept = torch.sum(model(X) ** 2)
            train(model)
            assert kept.requires_grad

    def test_the_parameter_itself_is_merged_after_each_step_of_any_loop():
        model = network()
        kernel = model.get_layer("a").kernel
        with ft.tune(model, "a/kernel[:, :4]"):
            (part,) = model.trainable_variables
            start = native(kernel)
            train(model)
            np.testing.assert_array_equal(native(kernel)[:, :4], np.array(part.value.detach()))
            optimizer = torch.optim.SGD([part._value], lr=0.1)
            torch.sum(model(X) ** 2).backward()
            optimizer.step()
            np.testing.assert_array_equal(native(kernel)[:, :4], np.array(part.value.detach()))
            np.testing.assert_array_equal(native(kernel)[:, 4:], start[:, 4:])
            with torch.no_grad():
                kernel._value.fill_(2.0)  # past Keras: the part follows
            assert (np.array(kernel.value.detach()) == 2).all()
            assert (np.array(part.value.detach()) == 2).all()


def own_step(model, optimizer):
    """One step of a loop that passes the model's state, as Keras' guides write it: value, gradient, new state."""
    if BACKEND == "jax":
        import jax

        def loss_of(trained, state):
            outputs, state = model.stateless_call(trained, state, X, training=True)
            return keras.ops.mean((outputs - Y) ** 2), state

        def run(trained, state, slots):
            (_, state), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained, state)
            trained, slots = optimizer.stateless_apply(slots, gradients, trained)
            return trained, state, slots

        return jax.jit(run)

    def run(trained, state, slots):
        def loss():
            outputs, new = model.stateless_call([v.value for v in model.trainable_variables], state, X, training=True)
            return keras.ops.mean(keras.ops.square(keras.ops.subtract(outputs, Y))), new

        _, gradients = ft.gradients(lambda: loss()[0], model.trainable_variables)
        new = loss()[1]
        return [a - 0.1 * g for a, g in zip(trained, gradients)], new, slots

    return run


# Elsewhere the gradients of this test are those of the variables themselves, which must hold each step's values.
@pytest.mark.parametrize("each", [True, False] if BACKEND == "jax" else [True])
@pytest.mark.parametrize("order", [1, -1], ids=["trained first", "state first"])
@pytest.mark.parametrize("what", ["a/kernel[:, :5]", "table/embeddings[:3]"])
def test_a_loop_that_passes_state_trains_the_part_however_it_writes_back(what, order, each, monkeypatch):
    results = []
    for by_fit in (True, False):
        keras.utils.set_random_seed(2)
        if what.startswith("table"):
            layers = [keras.Input((2,), dtype="int32"), L.Embedding(6, 4, name="table"), L.Flatten(), L.Dense(3)]
            monkeypatch.setitem(globals(), "X", np.random.default_rng(0).integers(0, 6, (16, 2)))
            model = keras.Sequential(layers)
        else:
            model = network()
        tuning = ft.tune(model, what)
        optimizer = keras.optimizers.SGD(0.1)
        if by_fit:
            model.compile(optimizer, "mse")
            model.fit(X, Y, batch_size=16, epochs=3, verbose=0)
        else:
            optimizer.build(model.trainable_variables)
            lists = [model.trainable_variables, model.non_trainable_variables, optimizer.variables]
            step = own_step(model, optimizer)
            # As plain values: on PyTorch those with a history may not be used once the variable has changed.
            state = [[keras.ops.stop_gradient(v.value) for v in variables] for variables in lists]
            for number in range(3):
                state = step(*state)
                if each or number == 2:
                    for variables, values in [*zip(lists[:2], state)][::order]:
                        for variable, value in zip(variables, values):
                            variable.assign(value)
        assert tuning.verify()
        tuning.finish()
        assert tuning.patch.items()
        results.append(tuning.patch)
    ((path, by_keras),) = results[0].items()
    assert by_keras.moved
    np.testing.assert_allclose(results[1][path].new, by_keras.new, rtol=1e-5, atol=1e-6)


def test_weights_set_during_such_a_loop_are_set():
    model = network()
    with ft.tune(model, "a/kernel[:, :5]") as tuning:
        model.stateless_call(
            *([v.value for v in variables] for variables in (model.trainable_variables, model.non_trainable_variables)),
            X,
        )
        model.set_weights([np.full(w.shape, 2, w.dtype) for w in model.get_weights()])
        np.testing.assert_array_equal(np.array(keras.ops.convert_to_numpy(model.trainable_variables[0])), 2)
        assert (tuning.patch["a/kernel"].new == 2).all()
