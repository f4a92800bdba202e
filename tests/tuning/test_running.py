"""A tuning does not end inside of `fit`, and an optimizer of its parts does not train the plain model."""

import keras
import numpy as np
import pytest

import finetooth as ft

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 3)).astype("float32")


def network() -> keras.Model:
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((8,)), dense(6, "tanh", name="a"), dense(3, name="b")])


@pytest.mark.parametrize("when", ["on_train_begin", "on_train_batch_end", "on_epoch_begin", "on_epoch_end"])
@pytest.mark.parametrize("end", ["finish", "revert"])
def test_the_end_inside_of_fit_is_refused_and_loses_nothing(end, when):
    model = network()
    tuning = ft.tune(model, "a/kernel[:, :4]")
    model.compile("sgd", "mse")
    errors = []

    def stop(*args, **logs):
        try:
            getattr(tuning, end)()
        except ft.TuningError as error:
            errors.append(str(error))

    callback = keras.callbacks.LambdaCallback(**{when: stop})
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[callback])
    assert errors and all("stop_training" in error for error in errors)
    trained = model.get_weights()
    assert tuning.active and tuning.verify()
    tuning.finish()
    assert all(np.array_equal(a, b) for a, b in zip(trained, model.get_weights()))
    assert "fit" not in model.__dict__


def test_a_failure_of_fit_lets_the_tuning_end():
    def fail(*args, **logs):
        raise KeyboardInterrupt

    model = network()
    with pytest.raises(KeyboardInterrupt), ft.tune(model, "a/kernel[:, :4]") as tuning:
        model.compile("sgd", "mse")
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=fail)])
    assert not tuning.active and tuning.verify() and tuning.patch["a/kernel"].moved


def test_an_optimizer_of_parts_asks_for_compile_and_the_weights_stay():
    model = network()
    with ft.tune(model, "a/kernel[:, :4]"):
        model.compile("adam", "mse")
        model.fit(X, Y, verbose=0)
    weights = model.get_weights()
    for train in (lambda: model.fit(X, Y, verbose=0), lambda: model.train_on_batch(X, Y)):
        with pytest.raises(ft.TuningError, match="compile"):
            train()
        assert all(np.array_equal(a, b) for a, b in zip(weights, model.get_weights()))
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    assert not np.array_equal(weights[2], model.get_weights()[2])
