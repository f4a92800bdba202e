"""The two halves of a model that is cut: models of its own layers, which show no trace of them afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from ..errors import TuningError
from ..keras_internals import private as keras_private
from .split_graph import Cut, outputs_of


@contextmanager
def halves(cut: Cut) -> Iterator[tuple[keras.Model, keras.Model]]:
    """The models below and above the cut, of the model's own layers, which show no trace of them afterwards."""
    with _noted() as made:
        lower = _functional(cut.model, _input(cut.model), alone([t for _, t in _below(cut, made)]), "_lower")
        yield lower, _upper(cut, made)


@contextmanager
def prefix(cut: Cut) -> Iterator[tuple[keras.Model, list[Any]]]:
    """A model of all that is made below, and the operations that make it."""
    with _noted() as made:
        results = _below(cut, made, every=True)
        yield _functional(cut.model, _input(cut.model), [t for _, t in results], "_prefix"), [op for op, _ in results]


def alone(items: Sequence[Any]) -> Any:
    """A single item as such, several as a list, which is how Keras takes and gives them."""
    return items[0] if len(items) == 1 else list(items)


def _below(cut: Cut, made: list[Any], every: bool = False) -> list[tuple[Any, Any]]:
    """The tensors that cross the cut, or all that are made below it, in a graph with nested models cut short.

    Each comes with its maker: with the path of that, or with the operation itself where `every` is set.
    """
    return _run_below(cut, made, every)[1]


def _run_below(cut: Cut, made: list[Any], every: bool) -> tuple[dict[int, Any], list[tuple[Any, Any]]]:
    """Also what stands in for tensors of the graph that are made otherwise there, by the ids of these."""
    others: dict[int, Any] = {}
    results: list[tuple[Any, Any]] = []
    shortened: dict[int, tuple[keras.Model, list[Any]]] = {}
    for call in cut.below:
        within = cut.inner.get(id(call))
        taken = {id(tensor): others.get(id(tensor), tensor) for tensor in call.input_tensors}
        if within is not None:
            if id(call.operation) not in shortened:
                shortened[id(call.operation)] = _lower_within(within, made, every)
            half, makers = shortened[id(call.operation)]
            outputs = keras.tree.flatten(keras_private.call_again(call, taken, half))
            _note(made, half)
            frozen = [tensor for tensor, inside in outputs_of(call) if id(inside) not in within.made_above]
            others |= {id(old): new for old, new in zip(frozen, outputs)}
            results += zip(makers, outputs[len(frozen) :])
        else:
            if any(id(tensor) in others for tensor in call.input_tensors):
                outputs = keras.tree.flatten(keras_private.call_again(call, taken))
                _note(made, call.operation)
                others |= {id(old): new for old, new in zip(call.output_tensors, outputs)}
            if every:
                results += [(call.operation, others.get(id(tensor), tensor)) for tensor in call.output_tensors]
    own = [] if every else [(maker, others.get(id(tensor), tensor)) for maker, tensor in cut.own]
    return others, [*own, *results]


def _lower_within(cut: Cut, made: list[Any], every: bool) -> tuple[keras.Model, list[Any]]:
    """A nested model up to the cut, and the makers of what it makes after those of its outputs that are frozen."""
    others, results = _run_below(cut, made, every)
    model = cut.model
    frozen = [others.get(id(tensor), tensor) for tensor in model.outputs if id(tensor) not in cut.made_above]
    makers = [maker if every else f"{model.name}/{maker}" for maker, _ in results]
    return _functional(model, _input(model), [*frozen, *(tensor for _, tensor in results)]), makers


def _upper(cut: Cut, made: list[Any]) -> keras.Model:
    """The calls above, made again on inputs that stand for the tensors of the cut, and noted in the list."""
    inputs, tensors = _run_above(cut, made)
    model = cut.model
    structure = model.outputs[0] if isinstance(model, keras.Sequential) else model.output
    outputs = keras.tree.map_structure(lambda tensor: tensors[id(tensor)], structure)
    upper = _functional(model, alone(inputs), outputs, "_upper")
    if upper.output_names != getattr(model, "output_names", upper.output_names):
        raise TuningError(
            f"The outputs {model.output_names} of {model.name!r} would be called {upper.output_names}, since a frozen "
            "layer that makes one of them is also called above the cut. Train the model as a whole, with fit."
        )
    return upper


def _run_above(cut: Cut, made: list[Any]) -> tuple[list[Any], dict[int, Any]]:
    """New inputs for all that crosses the cut, and what the calls above make of them, by the ids of the old tensors."""
    inputs = _inputs(cut)
    tensors = {id(tensor): new for (_, tensor), new in zip(cut.own, inputs)}
    inside = iter(inputs[len(cut.own) :])
    shortened: dict[int, keras.Model] = {}
    for call in cut.above:
        within = cut.inner.get(id(call))
        if within is None:
            # Not `keras.Model(tensors, outputs)`, which mistakes a layer called on both sides for its input there.
            outputs = keras_private.call_again(call, tensors)
            _note(made, call.operation)
            old = call.output_tensors
        else:
            if id(call.operation) not in shortened:
                shortened[id(call.operation)] = _upper_within(within, made)
            half = shortened[id(call.operation)]
            entering = alone([next(inside) for _ in within.crossing])
            outputs = half(entering, training=keras_private.arguments_of(call)[1].get("training"))
            _note(made, half)
            old = [tensor for tensor, made_in in outputs_of(call) if id(made_in) in within.made_above]
        tensors |= {id(one): new for one, new in zip(old, keras.tree.flatten(outputs))}
    return inputs, tensors


def _upper_within(cut: Cut, made: list[Any]) -> keras.Model:
    """A nested model from the cut on, with those of its outputs that depend on what is trained."""
    inputs, tensors = _run_above(cut, made)
    outputs = [tensors[id(tensor)] for tensor in cut.model.outputs if id(tensor) in cut.made_above]
    return _functional(cut.model, alone(inputs), outputs)


def _inputs(cut: Cut) -> list[Any]:
    """An input for each tensor that crosses, named after the layer that makes it, as far as that name is free."""
    taken = {call.operation.name for call in cut.above}
    inputs = []
    for path, tensor in cut.crossing:
        maker = path.rpartition("/")[2]
        numbered = (f"{maker}_{i}" for i in itertools.count(2))
        name = next(name for name in itertools.chain([maker], numbered) if name not in taken)
        taken.add(name)
        inputs.append(keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, name=name))
    return inputs


def _input(model: keras.Model) -> Any:
    return model.inputs[0] if isinstance(model, keras.Sequential) else model.input


def _functional(model: keras.Model, inputs: Any, outputs: Any, suffix: str = "") -> keras.Model:
    # In this scope PyTorch takes no list of parameters yet, for which it would merge each part with its base.
    with keras.StatelessScope(initialize_variables=False):
        made = keras.Model(inputs, outputs, name=f"{model.name}{suffix}")
    made.dtype_policy = model.dtype_policy  # by which `compile` decides on loss scaling
    return made


def _note(made: list[Any], operation: Any) -> None:
    """Note the last call of an operation, with all operations that know of it."""
    call = keras_private.calls_in(operation)[-1]
    made.append((call, [operation, *keras_private.makers_of(call)]))


@contextmanager
def _noted() -> Iterator[list[Any]]:
    """A list of calls, of which no operation knows any more at the end."""
    made: list[Any] = []
    try:
        yield made
    finally:
        ids = {id(call) for call, _ in made}
        for operation in {id(each): each for _, known in made for each in known}.values():
            calls, onward = keras_private.calls_in(operation), keras_private.calls_out(operation)
            while calls and id(calls[-1]) in ids:  # not one before a call of somebody else: Keras finds it by its place
                calls.pop()
            for call in [call for call in onward if id(call) in ids]:
                onward.remove(call)
