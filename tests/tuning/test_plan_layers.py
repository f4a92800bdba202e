"""The plan of a tuning is computed before anything changes, and says of each layer how its calls change."""

import keras
import numpy as np
import pytest
from helpers import values

import finetooth as ft
from finetooth.keras_internals import private as keras_private
from finetooth.parts.trainable import TrainablePart
from finetooth.tuning.plan import plan_layers, plan_tuning, rules_of

L = keras.layers


def planned(model, *what, statistics="frozen", layer_rules=True):
    """The plan of each layer by its name, with variables by their paths; nothing is attached."""
    selection = ft.select(model, *what)
    plan = plan_tuning(model, selection, statistics)
    parts = [
        TrainablePart(v, selection[path], selection[path].gather(keras.ops.convert_to_numpy(v)))
        for path, v in plan.in_parts.items()
    ]
    layers = {layer: frozenset(id(v) for v in layer.weights) for layer in keras_private.layers_of(model)}
    rules = rules_of(layers, parts) if layer_rules else {}
    plans = plan_layers(layers, parts, [*plan.by_themselves, *plan.moving.values()], rules)
    return plan, {layer.name: plan for layer, plan in plans.items()}


def names(variables):
    return ["/".join(variable.path.split("/")[-2:]) for variable in variables]


def test_planning_changes_nothing():
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, name="a"), L.BatchNormalization(name="n")])
    before, kinds = values(model), [type(v) for v in model.weights]
    state = [(sorted(layer.__dict__), layer.trainable) for layer in keras_private.layers_of(model)]
    planned(model, "a/kernel[0]", "n/gamma[:2]", statistics="update")
    assert state == [(sorted(layer.__dict__), layer.trainable) for layer in keras_private.layers_of(model)]
    assert kinds == [type(v) for v in model.weights]
    assert all((before[path] == value).all() for path, value in values(model).items())


def test_a_layer_has_a_rule_or_composes_and_others_keep_their_call():
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, name="a"), L.Dense(3, name="b")])
    plan, plans = planned(model, "a/kernel[:, 1]", "a/bias[0]")
    assert list(plan.in_parts) == ["a/kernel", "a/bias"] and plan.by_themselves == []
    (part,) = plans["a"].rule.parts
    assert names([part.base]) == ["a/kernel"] and names(plans["a"].compose) == ["a/bias"]
    assert plans["a"].changes_calls and not plans["b"].changes_calls
    assert not plans[model.name].changes_calls  # a model composes nothing itself
    _, plans = planned(model, "a/kernel[:, 1]", "a/bias[0]", layer_rules=False)
    assert plans["a"].rule is None and names(plans["a"].compose) == ["a/kernel", "a/bias"]


@pytest.mark.parametrize("statistics", ["frozen", "update"])
def test_a_layer_with_statistics_keeps_what_may_not_move(statistics):
    model = keras.Sequential([keras.Input((4,)), L.Dense(4, name="a"), L.BatchNormalization(name="n")])
    plan, plans = planned(model, "n/gamma", statistics=statistics)
    assert names(plan.by_themselves) == ["n/gamma"] and plan.in_parts == {}
    assert plans["n"].assigns and plans["n"].rule is None and plans["n"].compose == ()
    moving = ["n/moving_mean", "n/moving_variance"]
    assert list(plan.moving) == (moving if statistics == "update" else [])
    assert names(plans["n"].freeze) == ["n/beta", *(() if plan.moving else moving)]
    assert plans["a"].freeze == () and not plans["a"].changes_calls


def test_weights_behind_a_gate_are_composed_there_alone():
    gate = ft.Gate(L.Dense(4, name="inner"), when=lambda: np.bool_(True), closed="skip", name="gate")
    model = keras.Sequential([keras.Input((4,)), gate, L.Dense(2, name="head")])
    _, plans = planned(model, "gate/**[:2]", "head/bias[0]", layer_rules=False)
    assert names(plans["inner"].compose) == names(gate.layer.weights)
    assert plans["gate"].compose == () and plans["gate"].freeze == ()  # nor does its flag count as a statistic
    assert names(plans["head"].compose) == ["head/bias"]


def test_low_precision_needs_a_part_and_full_precision_does_not():
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, name="a", dtype="bfloat16"), L.Dense(2, name="b")])
    plan = plan_tuning(model, ft.select(model, "**"), "frozen")
    assert list(plan.in_parts) == ["a/kernel", "a/bias"] and names(plan.by_themselves) == ["b/kernel", "b/bias"]
    assert list(plan.changing) == list(plan.regions) == ["a/kernel", "a/bias", "b/kernel", "b/bias"]
