"""Calls of custom layers and models may assign to inner weights: what is not selected keeps its bits nevertheless."""

import keras
import numpy as np
import pytest
from helpers import moved_outside, values

import finetooth as ft

L = keras.layers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 6)).astype("float32"), RNG.normal(size=(8, 4)).astype("float32")


class Averaging:
    """An online layer, and a target that follows it in each call; neither is a weight of the outer layer itself."""

    def __init__(self, **options):
        super().__init__(**options)
        self.online = L.Dense(4, name="online")
        self.target = L.Dense(4, name="target", trainable=False)

    def build(self, shape):
        self.online.build(shape)
        self.target.build(shape)
        self.built = True

    def call(self, x):
        self.follow()
        return self.online(x) + self.target(x)

    def follow(self):
        for target, online in zip(self.target.variables, self.online.variables):
            target.assign(0.9 * target + 0.1 * online)


class AveragingLayer(Averaging, L.Layer):
    pass


class AveragingModel(Averaging, keras.Model):
    pass


def around_layer():
    inputs = keras.Input((6,))
    return keras.Model(inputs, AveragingLayer(name="inner")(inputs))


def around_model():
    inputs = keras.Input((6,))
    return keras.Model(inputs, AveragingModel(name="inner")(inputs))


def patched():
    """A stock layer whose call the user has replaced by one that assigns."""
    model = keras.Sequential([keras.Input((6,)), L.Dense(6, name="inner"), L.Dense(4, name="online")])
    layer, original = model.get_layer("inner"), model.get_layer("inner").call

    def call(inputs, training=None):
        layer.bias.assign(layer.bias + 1.0)
        return original(inputs)

    layer.call = call
    return model


def built(make):
    keras.utils.set_random_seed(1)
    model = make()
    model.build((None, 6))
    return model


def fit(model):
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y, batch_size=4, epochs=1, verbose=0)


@pytest.mark.parametrize("make", [AveragingModel, around_layer, around_model, patched])
@pytest.mark.parametrize("what", [("kernel", np.s_[:, :2]), ("kernel", np.s_[...])], ids=["part", "whole"])
def test_weights_assigned_by_a_call_keep_their_bits(make, what):
    plain = built(make)
    before = values(plain)
    (path,) = (path for path in before if path.endswith("online/kernel"))
    fit(plain)
    assert sum((before[p] != now).any() for p, now in values(plain).items()) > 2  # so the call does assign
    model = built(make)
    selection = ft.select(model, (path, what[1]))
    with ft.tune(model, selection) as tuning:
        fit(model)
        assert tuning.verify() and tuning.patch[path].moved
    assert moved_outside(before, values(model), selection) == {}


def test_frozen_elements_of_an_assigned_weight_keep_their_bits():
    model = built(AveragingModel)
    before, selection = values(model), ft.select(model, "*/kernel[0]")
    with ft.tune(model, selection) as tuning:
        fit(model)
        assert tuning.verify()
    assert moved_outside(before, values(model), selection) == {}


def test_a_whole_selected_weight_may_be_assigned():
    model = built(AveragingModel)
    before = values(model)
    with ft.tune(model, "**"):
        fit(model)
    assert all((before[path] != value).any() for path, value in values(model).items())


def test_code_outside_of_calls_may_assign_and_verify_tells():
    model = built(AveragingModel)
    with ft.tune(model, "online/kernel[:, :2]") as tuning:
        fit(model)
        assert tuning.verify()
        model.follow()  # as a step of the user's own may
        assert not tuning.verify()


def test_calls_are_plain_again_afterwards():
    model = built(AveragingModel)
    with ft.tune(model, "online/kernel[:, :2]") as tuning:
        fit(model)
        tuning.revert()
    before = values(model)
    model(X)
    after = values(model)
    assert "call" not in model.__dict__
    assert (after["target/kernel"] != before["target/kernel"]).any()
