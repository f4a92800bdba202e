"""Models with a `train_step` of their own, written as the guides of each backend show it."""

import keras
import numpy as np
from helpers import moved_inside, moved_outside, values

import finetooth as ft

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    class OwnStep(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

elif keras.backend.backend() == "jax":
    import jax

    class OwnStep(keras.Model):
        def loss_of(self, trainable, non_trainable, x, y):
            y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
            return self.compute_loss(x, y, y_pred), non_trainable

        def train_step(self, state, data):
            trainable, non_trainable, optimizer, metrics = state
            x, y = data
            step = jax.value_and_grad(self.loss_of, has_aux=True)
            (loss, non_trainable), gradients = step(trainable, non_trainable, x, y)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            return {"loss": loss}, (trainable, non_trainable, optimizer, metrics)

else:
    import torch

    class OwnStep(keras.Model):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss.backward()
            variables = self.trainable_variables
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in variables], variables)
            return {"loss": loss}


def network(kind):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,))
    x = keras.layers.Dense(6, "tanh", name="in")(inputs)
    return kind(inputs, keras.layers.Dense(3, name="out")(x))


def test_a_train_step_of_ones_own_trains_the_part_as_the_stock_one_does():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 5)).astype("float32"), rng.normal(size=(12, 3)).astype("float32")
    results = []
    for kind in (keras.Model, OwnStep):
        model = network(kind)
        before = values(model)
        with ft.tune(model, "*/kernel[1:3]") as tuning:
            model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "mse")
            model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        results.append(values(model))
        assert moved_outside(before, results[-1], tuning.selection) == {}
        assert sum(moved_inside(before, results[-1], tuning.selection).values()) == tuning.selection.size
    for path in results[0]:
        np.testing.assert_allclose(results[0][path], results[1][path], rtol=1e-5, atol=1e-6)


def test_a_loop_of_ones_own_outside_of_fit():
    """Nothing of `fit` is needed: the trainable variables are the parts, and the model reads them."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 5)).astype("float32"), rng.normal(size=(12, 3)).astype("float32")
    model = network(keras.Model)
    before = values(model)
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.1)
    losses = []
    with ft.tune(model, "*/kernel[1:3]") as tuning:
        variables = model.trainable_variables
        optimizer.build(variables)
        for _ in range(5):
            losses.append(float(_step(model, optimizer, variables, x, y)))
    assert losses[-1] < losses[0]
    assert moved_outside(before, values(model), tuning.selection) == {}
    assert sum(moved_inside(before, values(model), tuning.selection).values()) == tuning.selection.size


def _step(model, optimizer, variables, x, y):
    def loss_of(y_pred):
        return keras.ops.mean(keras.ops.square(keras.ops.subtract(y_pred, y)))

    if keras.backend.backend() == "tensorflow":
        with tf.GradientTape() as tape:
            loss = loss_of(model(x))
        optimizer.apply(tape.gradient(loss, variables), variables)
    elif keras.backend.backend() == "torch":
        model.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        optimizer.apply([v.value.grad for v in variables], variables)
    else:
        frozen = [v.value for v in model.non_trainable_variables]

        def total(values):
            return loss_of(model.stateless_call(values, frozen, x)[0])

        loss, gradients = jax.value_and_grad(total)([v.value for v in variables])
        state, parts = ([v.value for v in side] for side in (optimizer.variables, variables))
        new, state = optimizer.stateless_apply(state, gradients, parts)
        for variable, value in zip([*variables, *optimizer.variables], [*new, *state]):
            variable.assign(value)
    return keras.ops.convert_to_numpy(loss)
