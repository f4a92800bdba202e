"""slots_of: the oracle is the optimizer's own step, and what its papers say of the shapes of its state."""

import keras
import numpy as np
import pytest
from keras import ops

import finetooth as ft
from finetooth.keras_internals.private import optimizers_in
from finetooth.keras_internals.weights import to_numpy
from finetooth.optimizers.slots import shared_state, slots_of

K = keras.optimizers


def rate():
    return 0.1


SLOTS = {  # the number of slots of a matrix
    "SGD": (lambda **o: K.SGD(0.1, **o), 0),
    "momentum": (lambda **o: K.SGD(0.1, momentum=0.9, **o), 1),
    "RMSprop": (lambda **o: K.RMSprop(0.1, centered=True, momentum=0.9, **o), 3),
    "Adam": (lambda **o: K.Adam(0.1, **o), 2),
    "amsgrad": (lambda **o: K.Adam(0.1, amsgrad=True, **o), 3),
    "AdamW": (lambda **o: K.AdamW(0.1, weight_decay=0.1, **o), 2),
    "Adadelta": (lambda **o: K.Adadelta(0.1, **o), 2),
    "Adagrad": (lambda **o: K.Adagrad(0.1, **o), 1),
    "Adamax": (lambda **o: K.Adamax(0.1, **o), 2),
    "Nadam": (lambda **o: K.Nadam(0.1, **o), 2),
    "Ftrl": (lambda **o: K.Ftrl(0.1, **o), 2),
    "Lion": (lambda **o: K.Lion(0.1, **o), 1),
    "Lamb": (lambda **o: K.Lamb(0.1, **o), 2),
    "Adafactor": (lambda **o: K.Adafactor(0.1, **o), 3),
    "Muon": (lambda **o: K.Muon(0.1, **o), 1),
    "ScheduleFreeAdamW": (lambda **o: K.ScheduleFreeAdamW(0.1, **o), 2),
    "schedule": (lambda **o: K.Adam(K.schedules.ExponentialDecay(0.1, 2, 0.5), **o), 2),
    "function": (lambda **o: K.Adam(rate, **o), 2),
}
WRAPPERS = {
    "alone": lambda make: make(),
    "average": lambda make: make(use_ema=True),
    "accumulation": lambda make: make(gradient_accumulation_steps=2),
    "both": lambda make: make(use_ema=True, gradient_accumulation_steps=2),
    "scaled": lambda make: K.LossScaleOptimizer(make(), 8.0),
    "several": lambda make: K.MultiOptimizer(K.OptimizerMap(make(), {"square": K.SGD(0.1, momentum=0.5)})),
    "by function": lambda make: (
        lambda one, other: K.MultiOptimizer(lambda variable: other if variable.path == "square" else one)
    )(make(), K.SGD(0.1, momentum=0.5)),
    "scaled, several": lambda make: K.LossScaleOptimizer(
        K.MultiOptimizer(K.OptimizerMap(make(), {"square": K.SGD(0.1, momentum=0.5)})), 8.0
    ),
}
SHAPES = {"matrix": (4, 6), "square": (4, 4), "vector": (5,), "number": (), "embedding": (3, 4), "tensor": (2, 3, 4)}


def made(make, wrapper="alone"):
    rng = np.random.default_rng(1)
    variables = [keras.Variable(rng.normal(size=shape).astype("float32"), name=name) for name, shape in SHAPES.items()]
    optimizer = WRAPPERS[wrapper](make)
    optimizer.build(variables)
    return optimizer, variables


def gradients(variables, seed=2):
    rng = np.random.default_rng(seed)
    return [ops.convert_to_tensor(rng.normal(size=tuple(v.shape)).astype("float32")) for v in variables]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", SLOTS)
def test_a_step_is_changed_by_a_slot_for_its_owner_alone(name, wrapper):
    make, count = SLOTS[name]
    optimizer, variables = made(make, wrapper)
    found = slots_of(optimizer)
    several = "several" in wrapper or wrapper == "by function"
    for variable in variables:
        if not (several and variable.path == "square") and variable.name in ("matrix", "square"):
            extra = {"average": 1, "accumulation": 1, "both": 2}.get(wrapper, 0)
            assert sum(slot.owner is variable for slot in found) == count + extra
    for slot in found:
        assert tuple(slot.variable.shape) == tuple(slot.owner.shape[axis] for axis in slot.axes)
    in_slots = {id(slot.variable) for slot in found}
    assert len(in_slots) == len(found)
    assert {id(v) for v in optimizer.variables} == in_slots | {id(v) for v in shared_state(optimizer)}
    assert all(len(v.shape) == 0 for v in shared_state(optimizer))

    untracked = [v for o in optimizers_in(optimizer) for v in vars(o).values() if isinstance(v, keras.Variable)]
    everything = [*variables, *optimizer.variables, *untracked]  # Nadam's product, if something else builds Nadam
    apply = getattr(optimizer, "inner_optimizer", optimizer).apply  # on JAX, Keras scales losses in compiled steps only
    apply(gradients(variables), variables)
    start = [np.array(to_numpy(v)) for v in everything]

    def stepped(changed):
        for variable, value in zip(everything, start):
            variable.assign(value)
        for slot in changed:
            slot.variable.assign(ops.convert_to_tensor(slot.variable) * -100.0)  # a square root of it is no number
        apply(gradients(variables, 3), variables)
        return [np.array(to_numpy(v)) for v in variables]

    plain = stepped([])
    for variable in variables:
        changed = [slot for slot in found if slot.owner is variable and slot.role != "average"]
        moved = [not np.array_equal(a, b) for a, b in zip(plain, stepped(changed))]
        assert moved == [bool(changed) and other is variable for other in variables]


@pytest.mark.parametrize("name", SLOTS)
def test_how_a_slot_begins_and_what_it_is(name):
    optimizer, variables = made(SLOTS[name][0], "both")
    found = slots_of(optimizer)
    for slot in found:
        fresh = to_numpy(slot.variable)
        if slot.role == "state":
            expected = to_numpy(slot.owner) if slot.begins == "value" else np.full(fresh.shape, slot.begins, "float32")
            np.testing.assert_array_equal(fresh, expected)
    expected = 2 * len(variables)
    assert [sum(slot.role == role for slot in found) for role in ("average", "accumulator")] == [expected / 2] * 2
    given = gradients(variables)
    optimizer.apply(given, variables)
    by_id = {id(v): to_numpy(g) for v, g in zip(variables, given)}
    for slot in found:
        if slot.role == "accumulator":
            np.testing.assert_allclose(to_numpy(slot.variable), by_id[id(slot.owner)], rtol=1e-6)
            assert slot.begins == 0
        if slot.role == "average":
            np.testing.assert_array_equal(to_numpy(slot.variable), to_numpy(slot.owner))
            assert slot.begins == "value"


def test_how_slots_begin_is_no_accident_of_the_values():
    begins = {name: {slot.begins for slot in slots_of(made(make)[0])} for name, (make, _) in SLOTS.items()}
    assert begins.pop("Adagrad") == {float(np.float32(0.1))}
    assert begins.pop("Ftrl") == {float(np.float32(0.1)), 0.0}
    assert begins.pop("ScheduleFreeAdamW") == {"value", 0.0}
    assert begins.pop("SGD") == set()
    assert all(found == {0.0} for found in begins.values())


def test_the_axes_of_a_square_are_told_apart():
    """Only the first row has a gradient: a mean over columns differs between rows, a mean over rows does not."""
    optimizer, variables = made(K.Adafactor)
    given = [
        ops.zeros(v.shape)
        if v.name != "square"
        else ops.convert_to_tensor(np.eye(4, 1, dtype="float32") * np.ones(4, "float32"))
        for v in variables
    ]
    optimizer.apply(given, variables)
    square = [slot for slot in slots_of(optimizer) if slot.owner.name == "square"]
    assert {slot.axes for slot in square} == {(0,), (1,), (0, 1)}
    spread = {slot.axes: float(np.ptp(to_numpy(slot.variable))) for slot in square}
    assert spread[0,] > 0.1 and spread[1,] == 0
    tensor = {slot.axes for slot in slots_of(optimizer) if slot.owner.name == "tensor"}
    assert tensor == {(0, 1), (0, 2), (0, 1, 2)}


class Forgetful(K.SGD):
    """Has state that its configuration does not tell of."""

    def __init__(self, learning_rate=0.1, more=False, **options):
        super().__init__(learning_rate, **options)
        self.more = more

    def build(self, variables):
        super().build(variables)
        if self.more:
            self.add_optimizer_variables(variables, "more")


class History(K.SGD):
    """Keeps state for all variables together, and one number for each, made in a loop."""

    def build(self, variables):
        super().build(variables)
        self.losses = self.add_variable((10,), name="losses")
        self.counts = [self.add_variable((), initializer="ones", name="count") for _ in variables]


def test_optimizers_of_users():
    optimizer, variables = made(History)
    assert [(slot.owner.name, slot.axes, slot.begins) for slot in slots_of(optimizer)] == [
        (v.name, (), 1.0) for v in variables
    ]
    assert "losses" in {v.name for v in shared_state(optimizer)}
    optimizer, _ = made(lambda: Forgetful(more=True))
    with pytest.raises(ft.TuningError, match="other state than a copy of it"):
        slots_of(optimizer)


def test_variables_built_later_are_seen():
    one, other = K.SGD(0.1, momentum=0.5), K.Adam(0.1)
    variables = [keras.Variable(np.ones(3), name=name) for name in "ab"]
    optimizer = K.MultiOptimizer(lambda variable: one)
    optimizer.build(variables[:1])
    assert [slot.owner for slot in slots_of(optimizer)] == variables[:1]
    optimizer.optimizers.append(other)
    other.build(variables[1:])
    assert [slot.owner for slot in slots_of(optimizer)] == [variables[0], variables[1], variables[1]]
    assert slots_of(K.Adam()) == []


def test_inside_of_wrappers_of_ours():
    variable = keras.Variable(np.ones((4, 3)), name="w")
    optimizer = ft.SelectiveOptimizer(K.LossScaleOptimizer(K.Adam(0.1)), [(variable, np.s_[1:3])])
    optimizer.build([variable])
    assert [tuple(slot.owner.shape) for slot in slots_of(optimizer)] == [(2, 3)] * 2
