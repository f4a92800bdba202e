"""Every optimizer of Keras, with every option, moves the selection and not one bit outside it."""

import contextlib
import functools
import inspect

import keras
import numpy as np
import pytest
from helpers import moved_inside, moved_outside, values
from natives import gradients_of, numpy_of

import finetooth as ft
from finetooth.keras_internals.weights import selectable

WRAPPERS = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
OPTIMIZERS = sorted(
    name
    for name, kind in vars(keras.optimizers).items()
    if inspect.isclass(kind) and issubclass(kind, keras.optimizers.Optimizer) and name not in WRAPPERS
)
OPTIONS = {
    "weight_decay": {"weight_decay": 0.1},
    "ema": {"use_ema": True, "ema_momentum": 0.9},
    "ema overwrite": {"use_ema": True, "ema_overwrite_frequency": 3},
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "accumulation": {"gradient_accumulation_steps": 4},
    "loss_scale_factor": {"loss_scale_factor": 64.0},
    "schedule": {"learning_rate": keras.optimizers.schedules.CosineDecay(0.01, 20)},
    "all": {"weight_decay": 0.1, "use_ema": True, "ema_overwrite_frequency": 3, "clipnorm": 0.1},
}
INDICES = {
    "in/kernel": np.s_[1:4, ::2],
    "in/bias": np.s_[[0, 3]],
    "out/kernel": np.eye(6, 3, dtype=bool),
    "table/embeddings": np.s_[2:5],
}
PART = tuple(INDICES.items())
STEPS = 20


def network():
    """Constraints and regularizers on every variable, a table read with repeated rows, -0.0 and denormals in each."""
    words = keras.Input((4,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 5, name="table")(words))
    extras = {"kernel_regularizer": "l2", "bias_regularizer": "l2"}
    x = keras.layers.Dense(6, "tanh", name="in", kernel_constraint=keras.constraints.MaxNorm(0.5), **extras)(x)
    y = keras.layers.Dense(3, name="out", kernel_constraint="unit_norm", bias_constraint="non_neg", **extras)(x)
    model = keras.Model(words, y)
    for weight in model.weights:
        value = np.array(keras.ops.convert_to_numpy(weight))
        value.reshape(-1)[0], value.reshape(-1)[-1] = -0.0, 1e-41
        weight.assign(value)
    return model


def data(steps):
    rng = np.random.default_rng(0)
    return rng.integers(0, 6, (steps * 4, 4)), rng.normal(size=(steps * 4, 3)).astype("float32")


def train(optimizer, part=PART, steps=STEPS, **options):
    """Tune the part for some steps; the model's weights before and after, and what the tuning says."""
    model = network()
    x, y = data(steps)
    before = values(model)
    with ft.tune(model, ft.select(model, *part)) as tuning:
        model.compile(optimizer, "mse", **options)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    after = values(model)
    assert moved_outside(before, after, tuning.selection) == {}
    assert tuning.verify()
    assert all(np.isfinite(value).all() for value in after.values())
    return before, after, tuning


def check_compact(optimizer, selection):
    """Each state variable is a scalar or the size of one part at most, and there are few of them per part."""
    largest = max(region.size for _, region in selection.items())
    sizes = [int(np.prod(variable.shape)) for variable in optimizer.variables]
    assert max(sizes) <= largest
    assert sum(sizes) <= 5 * selection.size + 20


def make(name, **options):
    return getattr(keras.optimizers, name)(**{"learning_rate": 0.01, **options})


@functools.cache
def plain():
    """An untuned copy of the model, and the gradients of plain autodiff for its weights by path."""
    model = network()
    weights = selectable(model)
    of_all = gradients_of(model, lambda y, p: keras.ops.mean(keras.ops.square(keras.ops.subtract(p, y))))
    assert list(map(id, weights.values())) == list(map(id, model.trainable_variables))
    return model, weights, lambda x, y: dict(zip(weights, map(numpy_of, of_all(x, y))))


def expected_of(optimizer, before, steps):
    """Keras' optimizer on bare variables that hold the selected elements, given what full gradients have for them.

    Returns the model's weights after the steps, and after the end of training.
    """
    model, weights, gradients = plain()
    whole = {path: value.copy() for path, value in before.items()}
    for path, weight in weights.items():
        weight.assign(before[path])
    bare = {}
    for path, index in INDICES.items():
        with contextlib.ExitStack() as stack:  # named as parts are, since Muon leaves out embeddings by name
            stack.enter_context(keras.name_scope(path.split("/")[0]))
            bare[path] = keras.Variable(before[path][index], name=f"{path.split('/')[1]}_part")
        if weights[path].constraint is not None:
            bare[path].constraint = functools.partial(constrained, weights[path].constraint, before[path], index)

    def merge():
        for path, index in INDICES.items():
            whole[path][index] = numpy_of(bare[path])
            weights[path].assign(whole[path])
        return {path: value.copy() for path, value in whole.items()}

    x, y = data(steps)
    for i in range(0, steps * 4, 4):
        found = gradients(x[i : i + 4], y[i : i + 4])
        parts = [keras.ops.convert_to_tensor(found[path][index]) for path, index in INDICES.items()]
        optimizer.apply(parts, list(bare.values()))
        merge()
    stepped = merge()
    optimizer.finalize_variable_values(list(bare.values()))
    return stepped, merge()


def constrained(constraint, frozen, index, variable):
    """Keras' constraint on the whole weight, of which the selected elements are taken."""
    whole = frozen.copy()
    whole[index] = numpy_of(variable)
    return keras.ops.convert_to_tensor(numpy_of(constraint(keras.ops.convert_to_tensor(whole)))[index])


def check_values(name, options, eager=False, steps=5):
    optimizer, alone = make(name, **options), make(name, **options)
    before, after, tuning = train(optimizer, steps=steps, run_eagerly=eager)
    moved = moved_inside(before, after, tuning.selection)
    assert all(count > 0 for path, count in moved.items()), moved
    check_compact(optimizer, tuning.selection)
    stepped, expected = expected_of(alone, before, steps)
    assert options.get("use_ema", False) == any((stepped[path] != expected[path]).any() for path in INDICES)
    for path in before:
        np.testing.assert_allclose(after[path], expected[path], rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_with_everything_switched_on(name):
    """Trap by trap: decay, EMA, FTRL's and ScheduleFree's own weights, Muon's mixing, constraints, regularizers.

    After training the weights are the averages, which the last two steps have moved from the weights they replaced.
    """
    # Keras' ScheduleFreeAdamW does something else eagerly than compiled on TensorFlow; the bare variables are eager.
    check_values(name, OPTIONS["all"], eager=name == "ScheduleFreeAdamW")


@pytest.mark.parametrize("name", ["SGD", "Adam", "Ftrl"])
def test_without_averages_and_eagerly(name):
    check_values(name, {"weight_decay": 0.1, "global_clipnorm": 0.1}, eager=True)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option(option):
    optimizer = make("Adam", **OPTIONS[option])
    before, after, tuning = train(optimizer)
    assert sum(moved_inside(before, after, tuning.selection).values()) > tuning.selection.size / 2
    check_compact(optimizer, tuning.selection)


@pytest.mark.parametrize("inner", ["Adam", "SGD"])
def test_loss_scale_optimizer(inner):
    optimizer = keras.optimizers.LossScaleOptimizer(make(inner), initial_scale=256.0, dynamic_growth_steps=5)
    before, after, tuning = train(optimizer)
    assert sum(moved_inside(before, after, tuning.selection).values()) > tuning.selection.size / 2
    check_compact(optimizer, tuning.selection)


def test_multi_optimizer_finds_the_parts_by_path():
    maps = keras.optimizers.OptimizerMap(make("SGD", learning_rate=0.0))
    maps["in/.*"] = make("Adam")
    before, after, tuning = train(keras.optimizers.MultiOptimizer(maps))
    moved = moved_inside(before, after, tuning.selection)
    assert moved["in/kernel"] > 0 and moved["in/bias"] > 0
    assert moved["table/embeddings"] == 0


def test_decay_can_be_switched_off_by_name():
    """Parts carry the names of their variables, so `exclude_from_weight_decay` finds them."""
    layer = keras.layers.Dense(3, name="d", bias_initializer="ones")
    model = keras.Sequential([keras.Input((4,)), layer])
    optimizer = make("SGD", weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    with ft.tune(model, "d/*[:2]") as tuning:
        model.compile(optimizer, lambda y, p: 0.0 * keras.ops.sum(p))  # without a gradient, only decay moves anything
        model.fit(np.zeros((4, 4)), np.zeros((4, 3)), verbose=0)
    assert {path: change.moved for path, change in tuning.patch.items()} == {"d/kernel": 0, "d/bias": 2}


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
@pytest.mark.parametrize(
    "index", [np.s_[1:4, :2], np.s_[[0, 3]], np.eye(6, 3, dtype=bool)], ids=["range", "rows", "points"]
)
def test_a_constraint_acts_on_the_merged_weight(index, eager):
    """Oracle: the constraint of Keras itself, on the whole weight after the step."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 6)).astype("float32"), rng.normal(size=(4, 3)).astype("float32")
    results = []
    for constraint in (None, keras.constraints.MaxNorm(0.4)):
        keras.utils.set_random_seed(1)
        keras.backend.clear_session(free_memory=False)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="d", kernel_constraint=constraint)])
        before = values(model)["d/kernel"]
        with ft.tune(model, ft.select(model, ("d/kernel", index))) as tuning:
            model.compile(make("AdamW", learning_rate=0.1), "mse", run_eagerly=eager)
            model.train_on_batch(x, y)
        results.append(values(model)["d/kernel"])
        region = tuning.selection["d/kernel"]
    free, constrained = results
    whole = keras.ops.convert_to_numpy(keras.constraints.MaxNorm(0.4)(keras.ops.convert_to_tensor(free)))
    np.testing.assert_allclose(constrained, region.scatter(before, region.gather(whole)), rtol=1e-6)
    assert not np.allclose(region.gather(free), region.gather(constrained))


def test_a_regularizer_acts_on_the_merged_weight():
    """The reported loss is that of plain Keras, frozen elements included; the gradient is the part's own."""
    losses = []
    for selection in ("d/kernel", "d/kernel[0]"):
        keras.backend.clear_session(free_memory=False)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="d", kernel_regularizer="l2")])
        model.get_layer("d").kernel.assign(np.arange(18.0).reshape(6, 3))
        with ft.tune(model, selection):
            model.compile(keras.optimizers.SGD(1.0), "mse")
            losses.append(model.train_on_batch(np.zeros((2, 6)), np.zeros((2, 3))))
    np.testing.assert_allclose(losses, [0.01 * (np.arange(18.0) ** 2).sum()] * 2, rtol=1e-6)
    kernel = values(model)["d/kernel"]
    np.testing.assert_allclose(kernel[0], np.arange(3) * (1 - 2 * 0.01), rtol=1e-6)
    np.testing.assert_array_equal(kernel[1:], np.arange(18.0).reshape(6, 3)[1:])


def test_accumulation_moves_nothing_before_the_update_step():
    """Neither gradient nor decay does; the table is what has no constraint, which Keras applies at every step."""
    model = network()
    moved = []
    with ft.tune(model, ft.select(model, *PART)) as tuning:
        model.compile(make("AdamW", gradient_accumulation_steps=4, weight_decay=0.1), "mse")
        for _ in range(5):
            model.train_on_batch(np.full((4, 4), 2), np.ones((4, 3)))
            moved.append(tuning.patch["table/embeddings"].moved)
    assert moved[:3] == [0, 0, 0] and moved[3] > 0 and moved[4] == moved[3]


def test_shape_aware_optimizers_get_the_shape_of_the_region():
    """Muon orthogonalises matrices: a block of a kernel is one, single elements are not and are trained as by AdamW."""
    optimizer = make("Muon")
    _, _, tuning = train(optimizer, part=("in/kernel[1:4, ::2]",))
    shapes = {tuple(variable.shape) for variable in optimizer.variables}
    assert (3, 3) in shapes
    assert shapes <= {(3, 3), ()}
