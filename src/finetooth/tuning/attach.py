"""Attach parts to a model, and detach them again.

Every step is a context manager, and `attached` is all of them in one: closing it, or failing half-way, undoes each in
reverse order. The model keeps its layers and variables; what changes meanwhile are trainable flags, the variables'
class (`parts.composed`), the lists of weights, and a few methods of the instances (`keras_internals.hooks`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from ..backends import backend
from ..backends.failed_steps import guarded_steps
from ..keras_internals import marks
from ..keras_internals import private as keras_private
from ..keras_internals.hooks import hooked
from ..keras_internals.weights import weights_by_path
from ..layer_rules import embedding
from ..parts import composed as compose
from ..parts.trainable import TrainablePart
from . import saving
from .optimizing import check_optimizer, renewed_after
from .plan import LayerPlan, Layers, plan_layers, rules_of
from .running import fits_counted, refuse_used_optimizer
from .shared_layers import training_made_anew
from .unchanged import check_unchanged, unchanged

Owned = Mapping[keras.Layer, list[TrainablePart]]  # every layer, with the parts of its own variables
Flags = Sequence[tuple[keras.Layer | keras.Variable, bool]]  # what is trainable


class _Thread(threading.local):
    hidden = 0  # how many contexts hide the parts just now


_thread = _Thread()


@contextmanager
def attached(
    model: keras.Model,
    parts: Collection[TrainablePart],
    themselves: Collection[keras.Variable],
    moving: Collection[keras.Variable],
    layer_rules: bool,
) -> Iterator[dict[TrainablePart, str]]:
    """Context manager: the model trains the parts, and the selected variables without one, and nothing else.

    Args:
        model: A built model, which no tuning is attached to.
        parts: The parts to train.
        themselves: The variables that train without a part.
        moving: The statistics that layers may update.
        layer_rules: Whether layers that have a rule use it.

    Yields:
        The name of the rule by which each part is read. A part that has none is composed.
    """
    layers = {layer: frozenset(id(v) for v in layer.weights) for layer in keras_private.layers_of(model)}
    with ExitStack() as stack:
        stack.callback(refuse_used_optimizer, model)
        stack.callback(backend.forget_traces, layers)  # at the very end, when no method is hooked
        backend.forget_traces(layers)
        for layer in layers:
            stack.enter_context(_marked_as_tuned(layer))
        stack.enter_context(saving.optimizer_saved_if_plain(model))
        stack.enter_context(saving.plain_files())
        before = stack.enter_context(_flags_set(model, layers, parts, themselves, moving))
        stack.enter_context(unchanged(model, layers))
        stack.enter_context(_parts_listed(layers, parts))
        stack.enter_context(saving.plain_view(layers, lambda: _seen_as_before(before, _owned(layers, parts))))
        for part in parts:
            stack.enter_context(compose.composed(part))
        rules = rules_of(layers, parts) if layer_rules else {}
        stack.enter_context(_calls_planned(plan_layers(layers, parts, [*themselves, *moving], rules)))
        compile_again = stack.enter_context(training_made_anew(layers))
        for part in parts:
            part.on_frozen_changed = compile_again
        names = {part: name for rule in rules.values() for part, name in rule.parts.items()}
        stack.enter_context(_training_checked(model, _merged(parts, names)))
        stack.enter_context(_steps_write_in_place(model, parts))
        yield names


@contextmanager
def sharing(model: keras.Model, parts: Collection[TrainablePart], names: Mapping[TrainablePart, str]) -> Iterator[None]:
    """Context manager: a model made of layers of a tuned one trains their parts as that one does, and as safely."""
    layers = {layer: frozenset(id(v) for v in layer.weights) for layer in keras_private.layers_of(model)}
    owned = _owned(layers, parts)
    with ExitStack() as stack:
        stack.enter_context(saving.optimizer_saved_if_plain(model))
        stack.enter_context(backend.parameters_listed(model, [part.variable for part in parts]))
        _hook_weight_lists(stack, model, [], lambda: _parts_hidden(owned))
        stack.enter_context(_training_checked(model, _merged(parts, names)))
        stack.enter_context(_steps_write_in_place(model, parts))
        yield


def _merged(parts: Collection[TrainablePart], names: Mapping[TrainablePart, str]) -> list[TrainablePart]:
    """Return the parts that a step reads merged with their base: all but those whose rows are looked up."""
    return [part for part in parts if names.get(part) != embedding.NAME]


@contextmanager
def _marked_as_tuned(layer: keras.Layer) -> Iterator[None]:
    """Context manager: the layer carries the mark by which a second tuning is refused."""
    layer.__dict__[marks.TUNED] = True
    try:
        yield
    finally:
        del layer.__dict__[marks.TUNED]


@contextmanager
def _flags_set(
    model: keras.Model,
    layers: Layers,
    parts: Collection[TrainablePart],
    themselves: Collection[keras.Variable],
    moving: Collection[keras.Variable],
) -> Iterator[Flags]:
    """Context manager: layers with something to train are trainable, and so are `themselves`, and nothing else is.

    Yields the flags from before.
    """
    trained = {id(part.base) for part in parts} | {id(v) for v in themselves}
    weights = list(weights_by_path(model).values())
    before = [(layer, layer.trainable) for layer in layers], [(v, v.trainable) for v in weights]
    for layer, inside in layers.items():
        # A normalisation layer that is not trainable uses its statistics, as at inference, and leaves them alone.
        keeps_statistics = isinstance(layer, keras.layers.BatchNormalization) and not moving
        keras_private.set_trainable(layer, bool(trained & inside) and not keeps_statistics)
    for variable in weights:
        variable.trainable = any(variable is v for v in themselves)
    frozen = [variable for variable in weights if not variable.trainable]
    try:
        with ExitStack() as stack:
            stack.enter_context(backend.without_gradients(frozen))
            for layer, trainable in before[0]:
                stack.enter_context(hooked(layer, "get_config", _config_with(trainable)))
            yield [*before[0], *before[1]]
    finally:
        for layer, trainable in before[0]:
            keras_private.set_trainable(layer, trainable)
        for variable, trainable in before[1]:
            variable.trainable = trainable


def _config_with(trainable: bool) -> Callable[..., Any]:
    """Hook `get_config`: the configuration of a layer, in a file for instance, holds the flag from before."""

    def get_config(original: Any) -> Any:
        config = original()
        return {**config, "trainable": trainable} if "trainable" in config else config

    return get_config


@contextmanager
def _parts_listed(layers: Layers, parts: Collection[TrainablePart]) -> Iterator[None]:
    """Context manager: layers list the parts of their variables as weights; `get_weights` and files leave them out."""
    owned = _owned(layers, parts)
    with ExitStack() as stack:
        for layer, inside in layers.items():
            contained = [part for part in parts if id(part.base) in inside]
            if contained:
                stack.enter_context(backend.parameters_listed(layer, [part.variable for part in contained]))
                _hook_weight_lists(stack, layer, owned[layer], lambda: _parts_hidden(owned))
        _each(keras_private.track, owned)
        stack.callback(_each, keras_private.untrack, owned)
        yield


def _owned(layers: Layers, parts: Collection[TrainablePart]) -> Owned:
    """Return the parts of each layer's own variables."""
    return {
        layer: [part for part in parts if any(v is part.base for v in keras_private.own_variables(layer))]
        for layer in layers
    }


def _each(action: Callable[[keras.Layer, keras.Variable], None], owned: Owned) -> None:
    for layer, parts in owned.items():
        for part in parts:
            action(layer, part.variable)


@contextmanager
def _parts_hidden(owned: Owned) -> Iterator[None]:
    """Context manager: layers do not list the parts."""
    _each(keras_private.untrack, owned)
    _thread.hidden += 1
    try:
        yield
    finally:
        _thread.hidden -= 1
        _each(keras_private.track, owned)


@contextmanager
def _seen_as_before(flags: Flags, owned: Owned) -> Iterator[None]:
    """Context manager: lists and flags are those from before, by which Keras orders the weights in HDF5 files."""
    during = [(each, each.trainable) for each, _ in flags]
    with _parts_hidden(owned):
        try:
            for each, trainable in flags:
                keras_private.set_trainable(each, trainable)
            yield
        finally:
            for each, trainable in during:
                keras_private.set_trainable(each, trainable)


def _hook_weight_lists(stack: ExitStack, layer: keras.Layer, owned: list[TrainablePart], hidden: Any) -> None:
    """Hook what gives out and takes all weights of a layer: without the parts, which follow their bases."""

    def plainly(original: Any, *args: Any, **kwargs: Any) -> Any:
        for part in owned:
            part.link.sync()
        with hidden(), compose.assigned_by_user(), backend.torch_module_reads(layer):
            return original(*args, **kwargs)

    def loading(original: Any, *args: Any, **kwargs: Any) -> None:
        with hidden(), compose.assigned_by_user():
            original(*args, **kwargs)
        for part in owned:
            part.load(keras_private.raw_value(part.base))

    for name in ("get_weights", "set_weights", "save_own_variables"):
        stack.enter_context(hooked(layer, name, plainly))
    stack.enter_context(hooked(layer, "load_own_variables", loading))


@contextmanager
def _calls_planned(plans: Mapping[keras.Layer, LayerPlan]) -> Iterator[None]:
    """Context manager: layers are called as planned, and frozen weights keep their values in those calls."""
    frozen = {id(variable): variable for plan in plans.values() for variable in plan.freeze}
    with ExitStack() as stack:
        for layer, plan in plans.items():
            if plan.changes_calls:
                stack.enter_context(hooked(layer, "call", _planned_call(layer, plan)))
                stack.enter_context(hooked(layer, "rematerialized_call", _rematerialized_anew))
        for variable in frozen.values():
            stack.enter_context(compose.frozen(variable))
        yield


def _planned_call(layer: keras.Layer, plan: LayerPlan) -> Callable[..., Any]:
    rule = plan.rule

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        with compose.layer_call(plan.compose), backend.torch_module_reads(layer):
            return original(*args, **kwargs)

    def call_by_rule(original: Any, *args: Any, **kwargs: Any) -> Any:
        if not all(map(backend.is_dense, (*args, *kwargs.values()))):
            return call(original, *args, **kwargs)  # which reads the merged variable
        return call(rule.call, *args, **kwargs) if plan.compose else rule.call(*args, **kwargs)  # type: ignore[union-attr]

    return call_by_rule if rule else call


def _rematerialized_anew(original: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
    """Give JAX a new function for each call. It caches traces by function, and the first part would stay in one."""
    return original(lambda *inner, **options: call(*inner, **options), *args, **kwargs)


@contextmanager
def _training_checked(model: keras.Model, merging: Collection[TrainablePart]) -> Iterator[None]:
    """Context manager: refuse optimizers that do not fit the parts, and lose no weights in a step that fails.

    State that is passed to the model has the parts in `merging` put in. Rows of a table are not among them: layers look
    them up, and merging would copy the table in a step that cannot write in place.
    """
    check = check_unchanged(model)

    def make_train_function(original: Any, *args: Any, **kwargs: Any) -> Any:
        if not _thread.hidden:  # weights are set, which has the step compiled again
            check()
            check_optimizer(model)
        return original(*args, **kwargs)

    def as_state(original: Any, *args: Any, **kwargs: Any) -> Any:
        with compose.base_only():
            return original(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(renewed_after(model))
        stack.enter_context(fits_counted(model))
        stack.enter_context(guarded_steps(model, "train", "test", "predict"))
        stack.enter_context(hooked(model, "make_train_function", make_train_function))
        stack.enter_context(hooked(model, "stateless_call", compose.with_merged_state(model, merging)))
        for name in keras_private.JAX_STATE:
            if hasattr(model, name):
                stack.enter_context(hooked(model, name, as_state))
        yield


@contextmanager
def _steps_write_in_place(model: keras.Model, parts: Collection[TrainablePart]) -> Iterator[None]:
    """Context manager: steps of the model's optimizers write the bases without copying them."""
    links = [part.link for part in parts]
    with ExitStack() as stack:
        known: list[Any] = []

        def make_train_function(original: Any, *args: Any, **kwargs: Any) -> Any:
            if links and model.optimizer is not None and not any(model.optimizer is other for other in known):
                known.append(model.optimizer)
                stack.enter_context(backend.stepping(model.optimizer, links))
            return original(*args, **kwargs)

        stack.enter_context(hooked(model, "make_train_function", make_train_function))
        yield
