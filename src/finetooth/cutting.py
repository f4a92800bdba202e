"""Where the graph of a model is cut in two, so that nothing below depends on what is trained, and the two halves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from .backends import keras_private
from .errors import TuningError

_STEPS = ("call", "train_step", "test_step", "compute_loss", "compute_metrics")


@dataclass(frozen=True)
class Cut:
    """The calls below and above, in order, and the tensors made below, by `makers`, that are wanted above."""

    model: keras.Model
    below: Sequence[Any]
    above: Sequence[Any]
    tensors: Sequence[Any]
    makers: Sequence[str]

    def model_below(self, outputs: Any, name: str) -> keras.Model:
        """A model from the inputs to tensors of the prefix."""
        model = self.model
        return _functional(
            model, model.inputs[0] if isinstance(model, keras.Sequential) else model.input, outputs, name
        )


def cut(model: keras.Model, trained: Mapping[str, keras.Variable]) -> Cut:
    """Cut as high as possible: above are only calls of layers that hold something trained, and what depends on them.

    A layer that is called several times may be on both sides. A nested model with something to train is above as a
    whole, like any other layer with layers inside.
    """
    calls = keras_private.calls_of(model)
    if calls is None:
        raise _not_plain(model)
    holding = {
        id(call): {id(v) for v in call.operation.weights} for call in calls if isinstance(call.operation, keras.Layer)
    }
    held = set().union(*holding.values())
    below, above, made_above = [], [], set()
    for call in calls:
        holds = any(id(v) in holding.get(id(call), ()) for v in trained.values())
        if holds or any(id(tensor) in made_above for tensor in call.input_tensors):
            above.append(call)
            made_above |= {id(tensor) for tensor in call.output_tensors}
        elif not call.is_input:
            below.append(call)
    _check_sides(model, below, above, [path for path, v in trained.items() if id(v) not in held])
    used = [*(tensor for call in above for tensor in call.input_tensors), *model.outputs]
    tensors = {id(tensor): tensor for tensor in used if id(tensor) not in made_above}
    makers = {id(tensor): call.operation.name for call in calls for tensor in call.output_tensors}
    for key, tensor in tensors.items():
        _check_storable(makers[key], tensor)
    return Cut(model, below, above, [*tensors.values()], [makers[key] for key in tensors])


@contextmanager
def halves(cut: Cut) -> Iterator[tuple[keras.Model, keras.Model]]:
    """The models below and above the cut, of the model's own layers, which show no trace of them afterwards."""
    made: list[Any] = []
    try:
        lower = cut.model_below(alone(cut.tensors), "lower")
        _check_plain(cut.model, type(lower))
        yield lower, _upper(cut, made)
    finally:
        _forget(made)


def alone(items: Sequence[Any]) -> Any:
    """A single item as such, several as a list, which is how Keras takes and gives them."""
    return items[0] if len(items) == 1 else list(items)


def _check_sides(model: keras.Model, below: list[Any], above: list[Any], outside: list[str]) -> None:
    if outside:
        raise TuningError(
            f"{outside} of {model.name!r} are trained, but no layer in its graph holds them, so it is not known where "
            "they are used. Train the model as a whole, with fit."
        )
    if not below:
        raise TuningError(
            f"{model.name!r} has no frozen prefix: {above[0].operation.name!r}, its first layer (a nested model counts "
            "as one), holds selected weights. Train it as a whole, with fit."
        )


def _check_storable(maker: str, tensor: Any) -> None:
    """Features are dense numbers, and `fit` makes all floating arrays `floatx`: that must lose nothing."""
    if tensor.sparse or tensor.dtype == "string":
        raise TuningError(f"What layer {maker!r} makes is sparse or text, and crosses the cut; it cannot be kept.")
    floatx = keras.config.floatx()
    narrower = np.dtype(tensor.dtype).itemsize < np.dtype(floatx).itemsize
    if keras.backend.is_float_dtype(tensor.dtype) and tensor.dtype != floatx and not narrower:
        raise TuningError(
            f"What layer {maker!r} makes is {tensor.dtype}, and `fit` turns arrays into {floatx}. "
            f"Call keras.config.set_floatx({str(tensor.dtype)!r}) first, so that features keep their bits."
        )


def _check_plain(model: keras.Model, functional: type[keras.Model]) -> None:
    """A step or a loss of the model's own would be missing above."""
    plain = keras.Sequential if isinstance(model, keras.Sequential) else functional
    if any(getattr(type(model), name) is not getattr(plain, name) for name in _STEPS):
        raise _not_plain(model)


def _not_plain(model: keras.Model) -> TuningError:
    return TuningError(
        f"{model.name!r}, a {type(model).__name__}, has a call or a training step of its own. Only Functional and "
        "Sequential models, whose layers say what they take from each other, can be split; train it as a whole."
    )


def _upper(cut: Cut, made: list[Any]) -> keras.Model:
    """The calls above, made again on inputs that stand for the tensors of the cut, and noted in the list."""
    taken = {call.operation.name for call in cut.above}
    inputs, tensors = [], {}
    for maker, tensor in zip(cut.makers, cut.tensors):
        numbered = (f"{maker}_{i}" for i in itertools.count(2))
        name = next(name for name in itertools.chain([maker], numbered) if name not in taken)
        taken.add(name)
        inputs.append(keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, name=name))
        tensors[id(tensor)] = inputs[-1]
    for call in cut.above:
        # Not `keras.Model(tensors, outputs)`, which mistakes a layer that is called on both sides for its input there.
        outputs = keras.tree.flatten(keras_private.call_again(call, tensors))
        made.append(keras_private.calls_in(call.operation)[-1])
        tensors |= {id(old): new for old, new in zip(call.output_tensors, outputs)}
    model = cut.model
    structure = model.outputs[0] if isinstance(model, keras.Sequential) else model.output
    outputs = keras.tree.map_structure(lambda tensor: tensors[id(tensor)], structure)
    upper = _functional(model, alone(inputs), outputs, "upper")
    if upper.output_names != getattr(model, "output_names", upper.output_names):
        raise TuningError(
            f"The outputs {model.output_names} of {model.name!r} would be called {upper.output_names}, since a frozen "
            "layer that makes one of them is also called above the cut. Train the model as a whole, with fit."
        )
    return upper


def _functional(model: keras.Model, inputs: Any, outputs: Any, name: str) -> keras.Model:
    # In this scope PyTorch takes no list of parameters yet, for which it would merge each part with its base.
    with keras.StatelessScope(initialize_variables=False):
        made = keras.Model(inputs, outputs, name=f"{model.name}_{name}")
    made.dtype_policy = model.dtype_policy  # by which `compile` decides on loss scaling
    return made


def _forget(made: list[Any]) -> None:
    ids = {id(call) for call in made}
    for operation in {id(call.operation): call.operation for call in made}.values():
        calls, onward = keras_private.calls_in(operation), keras_private.calls_out(operation)
        while calls and id(calls[-1]) in ids:  # not one before a call of somebody else: Keras finds that by its place
            calls.pop()
        for call in [call for call in onward if id(call) in ids]:
            onward.remove(call)
