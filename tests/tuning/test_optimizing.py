"""An optimizer goes on where it has trained the same weights, begins anew where it has trained none, or is refused."""

import gc

import keras
import numpy as np
import pytest
from helpers import values

import finetooth as ft

L = keras.layers
X = np.random.default_rng(0).normal(size=(48, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(48, 3)).astype("float32")
EAGER = {"run_eagerly": keras.backend.backend() != "jax"}
PART = ["a/kernel[:, 1:4]", ("a/bias", [0, 2]), "c/kernel"]


def network(dtype="float32"):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    layers = [L.Dense(6, "tanh", name="a", dtype=dtype), L.Dense(3, name="c", dtype=dtype)]
    return keras.Sequential([keras.Input((5,)), *layers], name="net")


def part_of(model, *items):
    return ft.select(model, *(items or PART))


def steps(model, first, last):
    """Train on batches by number; the loop does not shuffle."""
    for i in range(first, last):
        model.train_on_batch(X[8 * i : 8 * i + 8], Y[8 * i : 8 * i + 8])


def state_of(optimizer):
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in optimizer.variables]


def assert_same(a, b):
    """The same bits."""
    assert len(a) == len(b)
    for one, other in zip(a, b):
        np.testing.assert_array_equal(one, other)


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.05),
    "everything": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(0.05, 6),
        weight_decay=0.1,
        use_ema=True,
        global_clipnorm=0.5,
        gradient_accumulation_steps=2,
    ),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05)),
    "several": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1, momentum=0.9), {".*kernel.*": keras.optimizers.Adam()})
    ),
}


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "float32") for kind in OPTIMIZERS), ("Adam", "bfloat16")])
def test_two_tunings_of_a_selection_are_one_to_the_bit(kind, dtype):
    whole, halves = network(dtype), network(dtype)
    results = []
    for model, parts in ((whole, [(0, 6)]), (halves, [(0, 3), (3, 6)])):
        optimizer = OPTIMIZERS[kind]()
        model.compile(optimizer, "mse", **EAGER)
        for first, last in parts:
            with ft.tune(model, part_of(model)) as tuning:
                steps(model, first, last)
            assert tuning.verify()
        assert model.optimizer is optimizer
        results.append((values(model), state_of(optimizer)))
    (one, state), (two, other_state) = results
    assert_same(list(one.values()), list(two.values()))
    assert_same(state, other_state)
    assert any((one[path] != start).any() for path, start in values(network(dtype)).items())


def test_fit_goes_on_too():
    results = []
    for epochs in ([6], [2, 1, 3]):
        model = network()
        model.compile(keras.optimizers.Adam(0.05), "mse")
        for count in epochs:
            with ft.tune(model, part_of(model)):
                model.fit(X, Y, epochs=count, batch_size=24, shuffle=False, verbose=0)
        results.append([*values(model).values(), *state_of(model.optimizer)])
    assert_same(*results)


def test_the_same_optimizer_may_be_compiled_again_and_weights_may_have_changed():
    """The optimizer keeps its moments, as in Keras after `set_weights`; the part begins with the model's values."""
    model = network()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    with ft.tune(model, part_of(model)):
        model.compile(optimizer, "mse", **EAGER)
        steps(model, 0, 2)
    model.set_weights([weight + 1.0 for weight in model.get_weights()])
    momenta, before = state_of(optimizer), values(model)
    with ft.tune(model, part_of(model)) as tuning:
        assert_same(list(values(model).values()), list(before.values()))
        model.compile(optimizer, "mse", **EAGER)
        assert_same(state_of(optimizer), momenta)
        steps(model, 2, 3)
    assert tuning.verify() and int(optimizer.iterations) == 3
    tuning.revert()
    assert_same(list(values(model).values()), list(before.values()))


def test_a_loop_of_ones_own_goes_on():
    """Whoever holds the part variables, or an optimizer that does, has them again for the same selection."""
    model = network()
    optimizer = keras.optimizers.SGD(0.5)
    with ft.tune(model, part_of(model)):
        variables = model.trainable_variables
        optimizer.apply([keras.ops.ones(v.shape) for v in variables], variables)
    for what in (PART, ["a/kernel[:, 1:5]", *PART[1:]]):
        with ft.tune(model, part_of(model, *what)) as tuning:
            now = model.trainable_variables
            same = [a is b for a, b in zip(variables, now)]
            assert same == [what is PART, True, True]
            if what is PART:
                optimizer.apply([keras.ops.ones(v.shape) for v in now], now)
        if what is PART:
            change = tuning.patch["a/kernel"]
            np.testing.assert_allclose(change.new, change.old - 0.5, rtol=1e-6)


def test_parts_that_nobody_holds_are_gone():
    model = network()
    with ft.tune(model, part_of(model)):
        first = id(model.trainable_variables[0]), model.trainable_variables[0].path
    gc.collect()
    other = network()  # another model of the same names has parts of its own
    with ft.tune(model, part_of(model)), ft.tune(other, part_of(other)):
        assert not {id(v) for v in model.trainable_variables} & {id(v) for v in other.trainable_variables}
        assert model.trainable_variables[0].path == first[1]


# Optimizers that were built, and have trained nothing.


def expected_after_three_steps(dtype="float32", make=OPTIMIZERS["Adam"]):
    model = network(dtype)
    with ft.tune(model, part_of(model)):
        model.compile(make(), "mse", **EAGER)
        steps(model, 0, 3)
    return list(values(model).values())


def by_evaluate(model):
    model.evaluate(X, Y, verbose=0)


def by_build(model):
    model.optimizer.build(model.trainable_variables)


@pytest.mark.parametrize("built", [by_evaluate, by_build])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_was_built_and_not_used_begins_anew(kind, built):
    model = network()
    optimizer = OPTIMIZERS[kind]()
    model.compile(optimizer, "mse", **EAGER)
    built(model)
    with ft.tune(model, part_of(model)) as tuning:
        steps(model, 0, 3)
        trained = sum(np.prod(v.shape) for v in model.trainable_variables)
        slots = sum(np.prod(v.shape) for v in optimizer.variables if len(v.shape))
        assert slots % trained == 0 or kind == "several"  # nothing is left of the state for all weights
    assert model.optimizer is optimizer and tuning.verify()
    assert_same(list(values(model).values()), expected_after_three_steps(make=OPTIMIZERS[kind]))


def test_what_was_set_on_an_optimizer_stays_when_it_begins_anew():
    model = network()
    optimizer = keras.optimizers.AdamW(1.0, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer, "mse", **EAGER)
    by_build(model)
    optimizer.learning_rate = 0.25
    rate = optimizer.learning_rate
    with ft.tune(model, part_of(model, "a/kernel[0]", "a/bias[0]")):
        model.train_on_batch(0 * X[:8], 0 * Y[:8])
        assert optimizer.learning_rate is rate and float(rate) == 0.25
    start = values(network())
    np.testing.assert_allclose(values(model)["a/kernel"][0], start["a/kernel"][0] * (1 - 0.5 * 0.25), rtol=1e-5)


def test_a_loaded_model_that_was_compiled_can_be_tuned(tmp_path):
    model = network()
    model.compile(OPTIMIZERS["Adam"](), "mse")
    by_build(model)
    model.save(tmp_path / "new.keras")
    loaded = keras.saving.load_model(tmp_path / "new.keras")
    assert loaded.optimizer.built
    loaded.compile(loaded.optimizer, "mse", **EAGER)
    with ft.tune(loaded, part_of(loaded)):
        steps(loaded, 0, 3)
    assert_same(list(values(loaded).values()), expected_after_three_steps())


def test_an_optimizer_that_was_built_while_tuned_and_not_used_is_as_new_afterwards():
    model, plain = network(), network()
    with ft.tune(model, part_of(model)):
        model.compile(OPTIMIZERS["Adam"](), "mse", **EAGER)
        by_build(model)
    plain.compile(OPTIMIZERS["Adam"](), "mse", **EAGER)
    for each in (model, plain):
        steps(each, 0, 2)
    assert_same(list(values(model).values()), list(values(plain).values()))


# Optimizers that have trained something else.


def refused(model, count):
    """Training is refused with the truth, and neither weights nor the optimizer's state move."""
    before, state = values(model), state_of(model.optimizer)
    for train in (lambda: steps(model, 0, 1), lambda: model.fit(X, Y, verbose=0)):
        with pytest.raises(ft.TuningError, match=f"has trained other weights.* for {count} steps.*model.compile"):
            train()
    assert_same(list(values(model).values()), list(before.values()))
    assert_same(state_of(model.optimizer), state)


@pytest.mark.parametrize("inside", [False, True])
def test_momentum_of_all_weights_moves_nothing_in_a_tuning(inside):
    """Trap: ten dense steps build up momentum; then a part is trained by the same optimizer."""
    model = network()
    optimizer = OPTIMIZERS["SGD"]()
    model.compile(optimizer, "mse", **EAGER)
    for _ in range(2):
        steps(model, 0, 5)
    with ft.tune(model, part_of(model)) as tuning:
        if inside:
            model.compile(optimizer, "mse", **EAGER)
        refused(model, 10)
        with pytest.raises(ValueError, match="Unknown variable"):  # nor does Keras allow it in a loop of one's own
            optimizer.apply([keras.ops.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)
        assert tuning.verify() and all(change.moved == 0 for _, change in tuning.patch.items())
        model.compile(OPTIMIZERS["SGD"](), "mse", **EAGER)
        steps(model, 0, 2)
        assert tuning.verify()


@pytest.mark.parametrize("what", [["a/kernel[:, 1:5]", *PART[1:]], PART[:2], [*PART, "c/bias"], ["**"]])
def test_another_selection_needs_another_optimizer(what):
    """Trap: elements that stay selected would keep their moments only if their slots were theirs."""
    model = network()
    model.compile(OPTIMIZERS["Adam"](), "mse", **EAGER)
    with ft.tune(model, part_of(model)):
        steps(model, 0, 3)
    with ft.tune(model, part_of(model, *what)):
        refused(model, 3)
    with ft.tune(model, part_of(model)):  # and back: every moment is still there
        steps(model, 3, 6)
    once = network()
    once.compile(OPTIMIZERS["Adam"](), "mse", **EAGER)
    with ft.tune(once, part_of(once)):
        steps(once, 0, 6)
    assert_same(
        [*values(model).values(), *state_of(model.optimizer)], [*values(once).values(), *state_of(once.optimizer)]
    )


def test_another_models_optimizer_is_refused():
    model, other = network(), network()
    optimizer = OPTIMIZERS["Adam"]()
    with ft.tune(model, part_of(model)), ft.tune(other, part_of(other)):
        model.compile(optimizer, "mse", **EAGER)
        steps(model, 0, 1)
        other.compile(optimizer, "mse", **EAGER)
        refused(other, 1)


def test_steps_that_only_accumulate_count():
    model = network()
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), "mse", **EAGER)
    steps(model, 0, 1)
    assert int(model.optimizer.iterations) == 0
    with ft.tune(model, part_of(model)):
        refused(model, 1)


def test_an_optimizer_of_all_weights_goes_on_when_all_are_selected():
    results = []
    for tuned in (False, True):
        model = network()
        model.compile(OPTIMIZERS["Adam"](), "mse", **EAGER)
        steps(model, 0, 3)
        tuning = ft.tune(model, "**") if tuned else None
        steps(model, 3, 5)
        if tuning:
            tuning.finish()
        steps(model, 5, 6)
        results.append([*values(model).values(), *state_of(model.optimizer)])
    assert_same(*results)


# PyTorch.

if keras.backend.backend() == "torch":
    import torch

    def test_gradients_from_before_the_tuning_move_nothing_that_is_frozen():
        """Trap: freezing between `backward` and `step` leaves `.grad`, by which an optimizer steps all the same."""
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(2):  # it has momentum, too
            torch.nn.functional.mse_loss(model(X), torch.from_numpy(Y).to(model(X).device)).backward()
            if _ == 0:
                optimizer.step()
                optimizer.zero_grad()
        gradients = [v.value.grad.clone() for v in model.weights]
        before = values(model)
        tuning = ft.tune(model, part_of(model, "a/kernel[:, 1:4]", "c/kernel"))
        optimizer.step()
        assert tuning.verify()
        after = values(model)
        assert [path for path in before if (before[path] != after[path]).any()] == ["c/kernel"]  # as a whole: itself
        tuning.revert()
        assert all((v.value.grad == gradient).all() for v, gradient in zip(model.weights, gradients))
        optimizer.step()  # what the user left is there again
        assert all((before[path] != value).any() for path, value in values(model).items())
