"""The plan of a tuning, made before anything changes: the variables that move, and how layers are called."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import keras

from ..backends.tensor_region import wide
from ..keras_internals import marks
from ..keras_internals import private as keras_private
from ..keras_internals.calls import is_keras_call
from ..keras_internals.weights import selectable, weights_by_path
from ..layer_rules import rule_for
from ..layer_rules.rule import Rule
from ..parts.trainable import TrainablePart
from ..regions.region import Region, Whole
from ..selection.selection import Selection

Layers = Mapping[keras.Layer, frozenset[int]]  # every layer, outer ones first, with the ids of the weights inside it


@dataclass(frozen=True)
class TuningPlan:
    """The variables of a model that move, by path, and the region of each.

    `selected` hold selected elements, those of them `in_parts` need a part, `moving` are statistics that layers update.
    """

    selected: Mapping[str, keras.Variable]
    moving: Mapping[str, keras.Variable]
    regions: Mapping[str, Region]

    @property
    def changing(self) -> dict[str, keras.Variable]:
        """Everything that may change."""
        return {**self.selected, **self.moving}

    @property
    def in_parts(self) -> dict[str, keras.Variable]:
        """The variables that a part is trained for; a whole one of full precision trains as it does in plain Keras."""
        return {path: v for path, v in self.selected.items() if not _trains_itself(v, self.regions[path])}

    @property
    def by_themselves(self) -> list[keras.Variable]:
        """The selected variables that train without a part."""
        return [v for path, v in self.selected.items() if _trains_itself(v, self.regions[path])]


def plan_tuning(model: keras.Model, selection: Selection, statistics: str) -> TuningPlan:
    """Plan which variables of the model move. `statistics` is "frozen" or "update", as for `tune`."""
    weights = selectable(model)
    selected = {path: weights[path] for path in selection}
    moving = _moving_statistics(model, selected.values()) if statistics == "update" else {}
    regions = {path: selection[path] for path in selected} | {path: Whole(v.shape) for path, v in moving.items()}
    return TuningPlan(selected, moving, regions)


def _trains_itself(variable: keras.Variable, region: Region) -> bool:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return isinstance(region, Whole) and wide(dtype) == dtype


def _moving_statistics(model: keras.Model, selected: Collection[keras.Variable]) -> dict[str, keras.Variable]:
    """Return the statistics of layers that hold selected weights, by path."""
    ids = {id(v) for v in selected}
    moving = {
        id(v)
        for layer in keras_private.layers_of(model)
        if any(id(weight) in ids for weight in layer.weights)
        for v in _statistics_of(layer)
    }
    return {path: v for path, v in weights_by_path(model).items() if id(v) in moving}


def _statistics_of(layer: keras.Layer) -> list[keras.Variable]:
    """Return the layer's own weights that were not created to be trained, such as moving means."""
    if hasattr(layer, marks.GATE):
        return []
    trained = {id(v) for v in keras_private.made_trainable(layer)}
    return [v for v in keras_private.own_variables(layer) if id(v) not in trained]


def _runs_user_code(layer: keras.Layer) -> bool:
    """Test whether a call of the layer runs code that is neither Keras' nor a gate's, and may assign to any weight."""
    return not is_keras_call(layer) and not hasattr(layer, marks.GATE)


@dataclass(frozen=True)
class LayerPlan:
    """The changes to calls of one layer while its model is tuned.

    Args:
        rule: The rule that is called in place of the layer, if it has one.
        compose: The variables that are merged with their parts once, before the call.
        assigns: Whether the layer may assign to weights during a call: it has statistics, or runs code of the user's.
        freeze: The weights inside such a layer that keep their values whatever it assigns to them.
    """

    rule: Rule | None = None
    compose: tuple[keras.Variable, ...] = ()
    assigns: bool = False
    freeze: tuple[keras.Variable, ...] = ()

    @property
    def changes_calls(self) -> bool:
        """Test whether the layer's call differs from the plain one."""
        return bool(self.rule or self.compose or self.assigns)


def rules_of(layers: Layers, parts: Collection[TrainablePart]) -> dict[keras.Layer, Rule]:
    """Return the rule of each layer that has one for the parts of variables it owns."""
    rules = {}
    for layer in layers:
        own = {id(v) for v in keras_private.own_variables(layer)}
        rule = rule_for(layer, [part for part in parts if id(part.base) in own])
        if rule is not None:
            rules[layer] = rule
    return rules


def plan_layers(
    layers: Layers,
    parts: Collection[TrainablePart],
    free: Collection[keras.Variable],
    rules: Mapping[keras.Layer, Rule],
) -> dict[keras.Layer, LayerPlan]:
    """Plan the calls of every layer. Changes nothing.

    Args:
        layers: Every layer of the model, with the ids of the weights inside it.
        parts: The parts that are trained.
        free: The variables without a part that may move: selected as a whole, or statistics.
        rules: The layers that read parts by a rule.
    """
    gates = [layer for layer in layers if hasattr(layer, marks.GATE)]
    flags = [variable for gate in gates for variable in keras_private.own_variables(gate)]
    may_move = {id(v) for v in (*(part.base for part in parts), *free, *flags)}
    # What is behind a gate is composed there: made outside, it would have a gradient also while the gate is closed.
    gated_layers = {inner for gate in gates for inner in keras_private.layers_of(gate.layer)}
    gated_weights = {id(v) for gate in gates for v in gate.layer.weights}
    by_rule = {part for rule in rules.values() for part in rule.parts}
    composed = [part.base for part in parts if part not in by_rule]

    def composed_by(layer: keras.Layer) -> tuple[keras.Variable, ...]:
        if isinstance(layer, keras.Model):  # would keep all of its merged weights alive at once
            return ()
        inside = [v for v in composed if id(v) in layers[layer]]
        return tuple(v for v in inside if layer in gated_layers or id(v) not in gated_weights)

    plans = {}
    for layer in layers:
        kept = layers[layer] - {id(v) for v in (*free, *flags)}
        assigns = bool(_statistics_of(layer)) or bool(kept and _runs_user_code(layer))
        freeze = tuple(v for v in layer.weights if assigns and id(v) in layers[layer] - may_move)
        plans[layer] = LayerPlan(rules.get(layer), composed_by(layer), assigns, freeze)
    return plans
