"""Slots: which of an optimizer's variables belong to which of the variables that it trains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
from keras import ops

from ..backends import backend
from ..errors import TuningError
from ..keras_internals import marks, scopes
from ..keras_internals import private as keras_private
from ..keras_internals.hooks import hooked
from ..keras_internals.weights import to_numpy
from ..regions.region import Grid, Region

LENGTHS = (2, 3, 5, 7, 11, 13, 17, 19)  # of the axes of stand-ins: the shape of a slot says which axes it has


class Slot(NamedTuple):
    """A variable in which an optimizer keeps something for a variable that it trains."""

    variable: keras.Variable
    owner: Any  # the trained variable
    optimizer: keras.optimizers.Optimizer  # the one that keeps it: the innermost, where optimizers are wrapped
    axes: tuple[int, ...]  # the axes of the owner that it has, in order
    begins: float | Literal["value"] | None  # what a new one holds: a number, the owner's value, or something else
    role: Literal["state", "average", "accumulator"]  # an average follows the owner, an accumulator adds up gradients

    @property
    def elementwise(self) -> bool:
        """Whether the slot has one element for each element of its owner."""
        return self.axes == tuple(range(len(self.owner.shape)))


def slots_of(optimizer: keras.optimizers.Optimizer) -> list[Slot]:
    """Return the slots of a built optimizer, and of those that it wraps or delegates to.

    A copy of the optimizer is built for small stand-ins of the trained variables, and asked for which of them it makes
    each of its variables. No slot is known by its name, and no value of the optimizer or its variables is read: during
    `fit` on JAX they have none. The result is kept until the optimizer has other variables.

    Raises:
        TuningError: If a copy, made by `get_config()` and `from_config()`, keeps other state than the optimizer.
    """
    members = [member for member in keras_private.optimizers_in(optimizer) if member.built]
    holders = [m for m in members if not hasattr(m, "inner_optimizer") and not hasattr(m, "optimizers")]
    return [slot for holder in holders for slot in _slots_held_by(holder)]


def shared_state(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Return the variables that a built optimizer keeps once for all: counts of steps, rates, scales of the loss."""
    in_slots = {id(slot.variable) for slot in slots_of(optimizer)}
    return [variable for variable in optimizer.variables if id(variable) not in in_slots]


def carry(old: Any, region: Region, new: Any, new_region: Region, axes: tuple[int, ...] | None = None) -> None:
    """Copy the values of the elements that both regions have; of state along some axes, those of what both have there.

    State has the shape of a region's gathered values, or that of some axes of it.
    """
    value, known = np.array(to_numpy(new)), to_numpy(old)
    if axes is None:
        here, there = _shared(region.flat(), new_region.flat())
        value.reshape(-1)[there] = known.reshape(-1)[here]
    else:
        pairs = [_shared(_along(region, axis), _along(new_region, axis)) for axis in axes]
        value[np.ix_(*(there for _, there in pairs))] = known[np.ix_(*(here for here, _ in pairs))]
    new.assign(value)


def _along(region: Region, axis: int) -> Any:
    return region.axes[axis] if isinstance(region, Grid) else range(region.shape[axis])


def _shared(olds: Any, news: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return where the entries that both have are in each of them."""
    _, here, there = np.intersect1d(olds, news, assume_unique=True, return_indices=True)
    return here, there


def _slots_held_by(optimizer: Any) -> Sequence[Slot]:
    present = [*keras_private.trained_by(optimizer), *optimizer.variables]
    memory = optimizer.__dict__.get(marks.SLOTS) or _Memory([], [])
    if len(memory.known) != len(present) or any(a is not b for a, b in zip(memory.known, present)):
        memory = _Memory(present, _found(optimizer))
        optimizer.__dict__[marks.SLOTS] = memory  # past Keras' tracking on TensorFlow
    return memory.slots


class _Memory:
    """The slots of an optimizer, with the variables that it had when they were found.

    No list or tuple: Keras looks into those for objects to save, and would find the optimizer itself again.
    """

    def __init__(self, known: Sequence[Any], slots: Sequence[Slot]):
        self.known, self.slots = known, slots


def _found(optimizer: Any) -> list[Slot]:
    trained = keras_private.trained_by(optimizer)
    with ExitStack() as stack:
        stack.enter_context(backend.outside_of_graphs())
        stack.enter_context(scopes.outside_of_scopes())
        stand_ins = [_StandIn(variable) for variable in trained]
        copy = _unbuilt_copy(optimizer)
        made = _made_by_building(copy, stand_ins)
        beginnings = [_beginning(twin, stand_in) for twin, stand_in in made]
    averages = {id(v) for v in keras_private.averages_of(copy)}
    accumulators = {id(v) for v in keras_private.accumulators_of(copy)}
    owners = {id(stand_in): variable for stand_in, variable in zip(stand_ins, trained)}
    slots, rest = [], iter(optimizer.variables)
    for (twin, stand_in), begins in zip(made, beginnings):
        if stand_in is None:
            _next_like(twin, tuple(twin.shape), rest, optimizer)
            continue
        owner = owners[id(stand_in)]
        axes = tuple(LENGTHS.index(n) for n in twin.shape if n in LENGTHS[: len(owner.shape)])
        variable = _next_like(twin, tuple(owner.shape[axis] for axis in axes), rest, optimizer)
        if id(twin) in averages:  # which Keras sets to the value in the first step
            slots.append(Slot(variable, owner, optimizer, axes, "value", "average"))
        else:
            role: Any = "accumulator" if id(twin) in accumulators else "state"
            slots.append(Slot(variable, owner, optimizer, axes, begins, role))
    for variable in rest:
        if len(variable.shape):
            raise _unknown(optimizer, variable.name, variable.shape)
    return slots


class _StandIn(keras.Variable):
    """A small variable with the name, path, dtype and number of axes of another, and values that are all different."""

    def __init__(self, variable: Any):
        name = str(variable.name)
        path = getattr(variable, "path", None) or name.replace(":", "_")
        shape = LENGTHS[: len(variable.shape)]
        values = -1.5 - np.arange(math.prod(shape)).reshape(shape) / 7
        dtype = keras.backend.standardize_dtype(variable.dtype)
        super().__init__(values, dtype=dtype, name=name.replace("/", "_"))
        self.__dict__["_stands_for"] = path
        if getattr(variable, "overwrite_with_gradient", False):
            self.overwrite_with_gradient = True

    @property
    def path(self) -> str:
        """The path of the other variable, by which some optimizers choose what they do."""
        return self.__dict__.get("_stands_for", "stand_in")


def _unbuilt_copy(optimizer: Any) -> Any:
    # Keras reads the learning rate for the configuration, and JAX may have taken its value.
    with keras.StatelessScope([(v, ops.zeros((), v.dtype)) for v in optimizer.variables if not len(v.shape)]):
        config = optimizer.get_config()
    if "learning_rate" in config:
        config["learning_rate"] = 0.0  # a schedule or a function need not be copied
    return type(optimizer).from_config(config)


def _made_by_building(copy: Any, stand_ins: list[_StandIn]) -> list[tuple[Any, _StandIn | None]]:
    """Build the optimizer. Returns the variables it makes, each with the stand-in it is for, or None."""
    variables = _Noting(stand_ins)
    made: list[tuple[Any, _StandIn | None]] = []

    def add_from(original: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        before, variables.current = variables.current, reference_variable
        try:
            return original(reference_variable, *args, **kwargs)
        finally:
            variables.current = before

    def add(original: Any, *args: Any, **kwargs: Any) -> Any:
        variable = original(*args, **kwargs)
        made.append((variable, variables.current))
        return variable

    with hooked(copy, "add_variable_from_reference", add_from), hooked(copy, "add_variable", add):
        copy.build(variables)
    return made


class _Noting(list):
    """A list that knows which of its entries a loop has come to.

    Adafactor, and optimizers of users, make state by `add_variable` in a loop over the variables: nothing else says
    for which one it is.
    """

    current: Any = None

    def __iter__(self) -> Iterator[Any]:
        for self.current in super().__iter__():
            yield self.current
        self.current = None


def _beginning(twin: Any, stand_in: Any) -> float | Literal["value"] | None:
    value = to_numpy(twin)
    if stand_in is not None and value.shape == tuple(stand_in.shape) and (value == to_numpy(stand_in)).all():
        return "value"
    return float(value.flat[0]) if value.size and (value == value.flat[0]).all() else None


def _next_like(twin: Any, shape: tuple[int, ...], rest: Iterator[Any], optimizer: Any) -> Any:
    """Return the next of the optimizer's variables that has the twin's name and this shape.

    Only numbers are passed over. How many of these there are differs: a rate that is a schedule is no variable, and
    placeholders are tracked or not depending on who builds the optimizer.
    """
    for variable in rest:
        if variable.name == twin.name and tuple(variable.shape) == shape:
            return variable
        if len(variable.shape):
            break
    raise _unknown(optimizer, twin.name, shape)


def _unknown(optimizer: Any, name: str, shape: Any) -> TuningError:
    return TuningError(
        f"{optimizer.name!r} keeps other state than a copy of it: only one of them has a {name!r} of shape "
        f"{tuple(shape)}. Which variable its state belongs to is not known. Its get_config() should have all that it "
        "is made with."
    )
