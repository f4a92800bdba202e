"""How a model is made to train parts, and made as it was again.

Every step is a context manager, and `attached` is all of them in one: closing it, or failing half-way, undoes each in
reverse order. The model keeps its layers and variables; what changes for the time being are trainable flags, the
variables' class (`parts.composed`), the lists of weights, and a few methods of the instances (`hooks`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from ..backends import backend
from ..backends.failed_steps import guarded_steps
from ..keras_internals import private as keras_private
from ..keras_internals.hooks import hooked
from ..keras_internals.weights import weights_by_path
from ..layer_rules import embedding
from ..layer_rules.rule import Rule
from ..layer_rules.rules import rule_for
from ..parts import composed as compose
from ..parts.trainable import Trained
from . import saving
from .optimizing import check_optimizer, renewed_after
from .shared_layers import training_made_anew
from .unchanged import check_unchanged, unchanged

Layers = Mapping[keras.Layer, frozenset[int]]  # every layer, outer ones first, with the ids of the weights inside it
Owned = Mapping[keras.Layer, list[Trained]]  # every layer, with the parts of its own variables
Flags = Sequence[tuple[keras.Layer | keras.Variable, bool]]  # what is trainable


def statistics_of(layer: keras.Layer) -> list[keras.Variable]:
    """The layer's own weights that were not created to be trained: moving means and the like."""
    if hasattr(layer, keras_private.GATE):
        return []
    trained = {id(v) for v in keras_private.made_trainable(layer)}
    return [v for v in keras_private.own_variables(layer) if id(v) not in trained]


def moving_statistics(model: keras.Model, selected: Collection[keras.Variable]) -> dict[str, keras.Variable]:
    """The statistics of layers that hold selected weights, by path."""
    ids = {id(v) for v in selected}
    moving = {
        id(v)
        for layer in keras_private.layers_of(model)
        if any(id(weight) in ids for weight in layer.weights)
        for v in statistics_of(layer)
    }
    return {path: v for path, v in weights_by_path(model).items() if id(v) in moving}


@contextmanager
def attached(
    model: keras.Model,
    parts: Collection[Trained],
    themselves: Collection[keras.Variable],
    moving: Collection[keras.Variable],
    layer_rules: bool,
) -> Iterator[dict[Trained, str]]:
    """While open, the model trains the parts and the variables that train `themselves`, and nothing else.

    `moving` are the statistics that layers may update. Gives the names of the rules by which parts are read; a part
    that has none is composed; without `layer_rules` that is all of them.
    """
    layers = {layer: frozenset(id(v) for v in layer.weights) for layer in keras_private.layers_of(model)}
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_marked(layer))
        stack.enter_context(saving.optimizer_saved_if_plain(model))
        stack.enter_context(saving.plain_files())
        before = stack.enter_context(_flags(model, layers, parts, themselves, moving))
        stack.enter_context(unchanged(model, layers))
        stack.enter_context(_listed(layers, parts))
        stack.enter_context(saving.plain_view(layers, lambda: _as_before(before, _owned(layers, parts))))
        for part in parts:
            stack.enter_context(compose.composed(part))
        rules = _rules(layers, parts) if layer_rules else {}
        stack.enter_context(_calls(layers, parts, [*themselves, *moving], rules))
        compile_again = stack.enter_context(training_made_anew(layers))
        for part in parts:
            part.on_frozen_changed = compile_again
        names = {part: name for rule in rules.values() for part, name in rule.parts.items()}
        stack.enter_context(_training(model, _merged(parts, names)))
        stack.enter_context(_steps_in_place(model, parts))
        yield names


@contextmanager
def sharing(model: keras.Model, parts: Collection[Trained], names: Mapping[Trained, str]) -> Iterator[None]:
    """While open, a model made of layers of a tuned one trains their parts as that one does, and as safely."""
    layers = {layer: frozenset(id(v) for v in layer.weights) for layer in keras_private.layers_of(model)}
    owned = _owned(layers, parts)
    with ExitStack() as stack:
        stack.enter_context(saving.optimizer_saved_if_plain(model))
        stack.enter_context(backend.listing(model, [part.variable for part in parts]))
        _hook_weight_lists(stack, model, [], lambda: _hidden(owned))
        stack.enter_context(_training(model, _merged(parts, names)))
        stack.enter_context(_steps_in_place(model, parts))
        yield


def _merged(parts: Collection[Trained], names: Mapping[Trained, str]) -> list[Trained]:
    """The parts that a step reads merged with their base: all but those whose rows are looked up."""
    return [part for part in parts if names.get(part) != embedding.NAME]


@contextmanager
def _marked(layer: keras.Layer) -> Iterator[None]:
    layer.__dict__[keras_private.TUNED] = True
    try:
        yield
    finally:
        del layer.__dict__[keras_private.TUNED]


@contextmanager
def _flags(
    model: keras.Model,
    layers: Layers,
    parts: Collection[Trained],
    themselves: Collection[keras.Variable],
    moving: Collection[keras.Variable],
) -> Iterator[Flags]:
    """Layers with something to train are trainable, variables that train themselves are, and nothing else is.

    Gives the flags as they were before.
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
                stack.enter_context(hooked(layer, "get_config", _with_flag(trainable)))
            yield [*before[0], *before[1]]
    finally:
        for layer, trainable in before[0]:
            keras_private.set_trainable(layer, trainable)
        for variable, trainable in before[1]:
            variable.trainable = trainable


def _with_flag(trainable: bool) -> Callable[..., Any]:
    """A layer's configuration, in a file for instance, says what it is apart from the tuning."""

    def get_config(original: Any) -> Any:
        config = original()
        return {**config, "trainable": trainable} if "trainable" in config else config

    return get_config


@contextmanager
def _listed(layers: Layers, parts: Collection[Trained]) -> Iterator[None]:
    """The parts are weights of every layer that owns their base; what is saved or given out does not show them."""
    owned = _owned(layers, parts)
    with ExitStack() as stack:
        for layer, inside in layers.items():
            contained = [part for part in parts if id(part.base) in inside]
            if contained:
                stack.enter_context(backend.listing(layer, [part.variable for part in contained]))
                _hook_weight_lists(stack, layer, owned[layer], lambda: _hidden(owned))
        _each(keras_private.track, owned)
        stack.callback(_each, keras_private.untrack, owned)
        yield


def _owned(layers: Layers, parts: Collection[Trained]) -> Owned:
    return {
        layer: [part for part in parts if any(v is part.base for v in keras_private.own_variables(layer))]
        for layer in layers
    }


def _each(action: Callable[[keras.Layer, keras.Variable], None], owned: Owned) -> None:
    for layer, parts in owned.items():
        for part in parts:
            action(layer, part.variable)


@contextmanager
def _hidden(owned: Owned) -> Iterator[None]:
    _each(keras_private.untrack, owned)
    try:
        yield
    finally:
        _each(keras_private.track, owned)


@contextmanager
def _as_before(flags: Flags, owned: Owned) -> Iterator[None]:
    """While open, no part is listed, and what was trainable is: Keras orders weights in HDF5 files by these flags."""
    during = [(each, each.trainable) for each, _ in flags]
    with _hidden(owned):
        try:
            for each, trainable in flags:
                keras_private.set_trainable(each, trainable)
            yield
        finally:
            for each, trainable in during:
                keras_private.set_trainable(each, trainable)


def _hook_weight_lists(stack: ExitStack, layer: keras.Layer, owned: list[Trained], hidden: Any) -> None:
    def plainly(original: Any, *args: Any, **kwargs: Any) -> Any:
        for part in owned:
            part.link.sync()
        with hidden(), backend.foreign_reads(layer):
            return original(*args, **kwargs)

    def loading(original: Any, *args: Any, **kwargs: Any) -> None:
        with hidden():
            original(*args, **kwargs)
        for part in owned:
            part.load(keras_private.raw_value(part.base))

    for name in ("get_weights", "set_weights", "save_own_variables"):
        stack.enter_context(hooked(layer, name, plainly))
    stack.enter_context(hooked(layer, "load_own_variables", loading))


def _rules(layers: Layers, parts: Collection[Trained]) -> dict[keras.Layer, Rule]:
    """How layers read the parts of their own variables, where they have a rule."""
    rules = {}
    for layer in layers:
        own = {id(v) for v in keras_private.own_variables(layer)}
        rule = rule_for(layer, [part for part in parts if id(part.base) in own])
        if rule is not None:
            rules[layer] = rule
    return rules


@contextmanager
def _calls(
    layers: Layers,
    parts: Collection[Trained],
    free: Collection[keras.Variable],
    rules: Mapping[keras.Layer, Rule],
) -> Iterator[None]:
    """Around each call: read by rule or compose once, and drop what a layer assigns to weights that must not move."""
    may_move = {id(v) for v in (*(part.base for part in parts), *free)}
    gates = [layer for layer in layers if hasattr(layer, keras_private.GATE)]
    may_move |= {id(v) for gate in gates for v in keras_private.own_variables(gate)}
    # What is behind a gate is composed there: made outside, it would have a gradient also while the gate is closed.
    behind = {inner for gate in gates for inner in keras_private.layers_of(gate.layer)}
    shut_in = {id(v) for gate in gates for v in gate.layer.weights}
    ruled = {part for rule in rules.values() for part in rule.parts}
    with ExitStack() as stack:
        guarded: dict[int, keras.Variable] = {}
        for layer, inside in layers.items():
            statistics = statistics_of(layer)
            if statistics:
                guarded |= {id(v): v for v in layer.weights if id(v) in inside and id(v) not in may_move}
            rule = rules.get(layer)
            # A model composes nothing itself: that would keep all of its merged weights alive at once.
            composing = [] if isinstance(layer, keras.Model) else [part for part in parts if part not in ruled]
            variables = [part.base for part in composing if id(part.base) in inside]
            variables = [v for v in variables if layer in behind or id(v) not in shut_in]
            if variables or statistics or rule:
                stack.enter_context(hooked(layer, "call", _reading(layer, variables, rule)))
                stack.enter_context(hooked(layer, "rematerialized_call", _rematerializing))
        for variable in guarded.values():
            stack.enter_context(compose.frozen(variable))
        yield


def _reading(layer: keras.Layer, variables: list[keras.Variable], rule: Rule | None) -> Callable[..., Any]:
    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        with compose.layer_call(variables), backend.foreign_reads(layer):
            return (rule.call if rule else original)(*args, **kwargs)

    def call_by_rule(original: Any, *args: Any, **kwargs: Any) -> Any:
        return rule.call(*args, **kwargs)  # type: ignore[union-attr]

    return call_by_rule if rule and not variables else call


def _rematerializing(original: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
    """JAX remembers what it traced by function: a new one each time, or the first call's part would stay in it."""
    return original(lambda *inner, **options: call(*inner, **options), *args, **kwargs)


@contextmanager
def _training(model: keras.Model, merging: Collection[Trained]) -> Iterator[None]:
    """Only an optimizer that fits is used on the parts, and no step that fails loses weights.

    State that is passed to the model has the parts in `merging` put in: not the rows of a table, which nobody reads
    merged, or a step without leave to write in place would copy the table.
    """
    check = check_unchanged(model)

    def make_train_function(original: Any, *args: Any, **kwargs: Any) -> Any:
        check()
        check_optimizer(model)
        return original(*args, **kwargs)

    def as_state(original: Any, *args: Any, **kwargs: Any) -> Any:
        with compose.base_only():
            return original(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(renewed_after(model))
        stack.enter_context(guarded_steps(model, "train", "test", "predict"))
        stack.enter_context(hooked(model, "make_train_function", make_train_function))
        stack.enter_context(hooked(model, "stateless_call", compose.with_merged_state(model, merging)))
        for name in keras_private.JAX_STATE:
            if hasattr(model, name):
                stack.enter_context(hooked(model, name, as_state))
        yield


@contextmanager
def _steps_in_place(model: keras.Model, parts: Collection[Trained]) -> Iterator[None]:
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
