"""Where the graph of a model is cut in two, so that nothing below depends on what is trained."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from ..errors import TuningError
from ..keras_internals import private as keras_private

_STEPS = ("call", "train_step", "test_step", "compute_loss", "compute_metrics")


@dataclass(frozen=True)
class Cut:
    """The calls below and above, in order, of a model, and of the nested models through which the cut goes.

    A call of such a nested model is on both sides, and in `inner`, by its id. `own` are the tensors of this graph, with
    the names of their makers, that are made below and wanted above.
    """

    model: keras.Model
    below: Sequence[Any]
    above: Sequence[Any]
    inner: Mapping[int, Cut]
    own: Sequence[tuple[str, Any]]
    made_above: Collection[int]

    @property
    def crossing(self) -> list[tuple[str, Any]]:
        """All tensors that cross, with the paths of their makers; those within nested models come last."""
        return [*self.own, *((f"{c.model.name}/{name}", t) for c in self._inner_in_order() for name, t in c.crossing)]

    def names(self, calls: Sequence[Any]) -> list[str]:
        """The paths of the layers that are called on the side of which these are the calls, each once."""
        side = "below" if calls is self.below else "above"
        paths: dict[str, None] = {}
        for call in calls:
            inner = self.inner.get(id(call))
            inside = [call.operation.name] if inner is None else inner.names(getattr(inner, side))
            paths |= dict.fromkeys(inside if inner is None else [f"{inner.model.name}/{name}" for name in inside])
        return list(paths)

    def _inner_in_order(self) -> list[Cut]:
        return [self.inner[id(call)] for call in self.below if id(call) in self.inner]


def cut(model: keras.Model, trained: Mapping[str, keras.Variable]) -> Cut:
    """Cut as high as possible: above are only calls of layers that hold something trained, and what depends on them.

    A layer that is called several times may be on both sides. The cut goes through nested Functional and Sequential
    models; any other layer with layers inside, and a nested model that takes something trained, is above as a whole.
    """
    _check_plain(model)
    made = _cut(model, {id(v) for v in trained.values()}, model.outputs)
    held = {id(v) for call in (*made.below, *made.above) for v in _weights(call)}
    _check_sides(model, made, [path for path, v in trained.items() if id(v) not in held])
    for maker, tensor in made.crossing:
        _check_storable(maker, tensor)
    return made


def _cut(model: keras.Model, trained: set[int], wanted: Sequence[Any]) -> Cut:
    calls = keras_private.calls_of(model) or ()
    whole: set[int] = set()
    while True:
        made = _divided(model, calls, trained, wanted, whole)
        cut_through = {id(call.operation) for call in made.below if id(call) in made.inner}
        both = cut_through & {id(call.operation) for call in made.above if id(call) not in made.inner}
        if not both:
            return made
        whole |= both  # one model cannot be cut at one call and stay whole at another


def _divided(
    model: keras.Model, calls: Sequence[Any], trained: set[int], wanted: Sequence[Any], whole: set[int]
) -> Cut:
    below, above, inner = [], [], {}
    made_above: set[int] = set()
    for call in calls:
        depends = any(id(tensor) in made_above for tensor in call.input_tensors)
        holds = any(id(v) in trained for v in _weights(call))
        within = _within(call, trained) if holds and not depends and id(call.operation) not in whole else None
        if within is not None:
            inner[id(call)] = within
            below.append(call)
            above.append(call)
            made_above |= {id(t) for t, made in outputs_of(call) if id(made) in within.made_above}
        elif holds or depends:
            above.append(call)
            made_above |= {id(tensor) for tensor in call.output_tensors}
        elif not call.is_input:
            below.append(call)
    used = [*(tensor for call in above if id(call) not in inner for tensor in call.input_tensors), *wanted]
    makers = {id(tensor): call.operation.name for call in calls for tensor in call.output_tensors}
    own = {id(tensor): (makers[id(tensor)], tensor) for tensor in used if id(tensor) not in made_above}
    return Cut(model, below, above, inner, list(own.values()), made_above)


def _within(call: Any, trained: set[int]) -> Cut | None:
    """The cut through a nested model; None where it must stay whole or has nothing frozen at its start."""
    model = call.operation
    if not isinstance(model, keras.Model) or keras_private.calls_of(model) is None:
        return None
    args, kwargs = keras_private.arguments_of(call)
    masks = keras.tree.flatten(kwargs.get("mask"))
    simple = len(args) == 1 and kwargs.keys() <= {"training", "mask"} and all(mask is None for mask in masks)
    stock = any(
        all(getattr(type(model), name) is getattr(kind, name) for name in ("__call__", "call", "compute_mask"))
        for kind in (keras.Sequential, _functional_kind())
    )
    if not simple or not stock or "call" in model.__dict__ or model.activity_regularizer is not None:
        return None
    made = _cut(model, trained, ())
    held = {id(v) for inner in (*made.below, *made.above) for v in _weights(inner)}
    outside = [v for v in model.weights if id(v) in trained and id(v) not in held]
    return made if made.below and not outside else None


def _weights(call: Any) -> list[keras.Variable]:
    return call.operation.weights if isinstance(call.operation, keras.Layer) else []


def outputs_of(call: Any) -> Iterator[tuple[Any, Any]]:
    """What a call of a nested model made, and the tensors inside of the model of which these come."""
    return zip(call.output_tensors, call.operation.outputs)


@functools.cache
def _functional_kind() -> type[keras.Model]:
    inputs = keras.Input((1,), name="input")
    return type(keras.Model(inputs, inputs, name="functional"))


def _check_sides(model: keras.Model, made: Cut, outside: list[str]) -> None:
    if outside:
        raise TuningError(
            f"{outside} of {model.name!r} are trained, but no layer in its graph holds them, so it is not known where "
            "they are used. Train the model as a whole, with fit."
        )
    if not made.below:
        first = made.above[0].operation
        deep = isinstance(first, keras.Model)
        raise TuningError(
            f"{model.name!r} has no frozen prefix: {first.name!r}, its first layer, holds selected weights"
            f"{' in its own first layer, or cannot be split' if deep else ''}. Train it as a whole, with fit."
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


def _check_plain(model: keras.Model) -> None:
    """A step or a loss of the model's own would be missing above."""
    plain = keras.Sequential if isinstance(model, keras.Sequential) else _functional_kind()
    own = any(getattr(type(model), name) is not getattr(plain, name) for name in _STEPS)
    if own or keras_private.calls_of(model) is None:
        raise TuningError(
            f"{model.name!r}, a {type(model).__name__}, has a call or a training step of its own. Only Functional and "
            "Sequential models, whose layers say what they take from each other, can be split; train it as a whole."
        )
