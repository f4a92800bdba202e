"""What users bring along: optimizers that cannot be copied, several of them, layers that TensorFlow traces."""

import keras
import numpy as np
import pytest

import finetooth as ft

BACKEND = keras.backend.backend()
L = keras.layers
X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 3)).astype("float32")


def network() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), L.Dense(6, "tanh", name="a"), L.Dense(3, name="b")])


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """As tutorials write it: without a configuration."""

    def __call__(self, step):
        return 0.1 * 0.5 ** keras.ops.cast(step, "float32")


def test_an_optimizer_that_cannot_be_copied_trains_and_does_not_hide_errors():
    model = network()
    with pytest.raises(ZeroDivisionError):
        with ft.tune(model, "a/kernel[:, :4]") as tuning:
            model.compile(keras.optimizers.SGD(Halving()), "mse")
            model.evaluate(X, Y, verbose=0)
            model.optimizer.build(model.trainable_variables)
            raise ZeroDivisionError
    assert not tuning.active and len(model.trainable_variables) == 4
    model.compile(keras.optimizers.SGD(Halving()), "mse")
    model.optimizer.build(model.trainable_variables)
    with ft.tune(model, "a/kernel[:, :4]"):
        with pytest.raises(ft.TuningError, match="does not make another like it"):
            model.fit(X, Y, verbose=0)
        model.compile(keras.optimizers.SGD(Halving()), "mse")
        before = np.array(model.trainable_variables[0])
        model.fit(X, Y, verbose=0)
        assert (np.array(model.trainable_variables[0]) != before).all()


class Pair(keras.Model):
    """A model with optimizers of its own, as of a GAN."""

    def __init__(self):
        super().__init__()
        self.first, self.second = L.Dense(6, name="first"), L.Dense(3, name="second")
        self.optimizers_of_parts = [keras.optimizers.Adam(0.1)]
        self.other_optimizer = keras.optimizers.Adam(0.1)

    def call(self, x):
        return self.second(self.first(x))

    def get_config(self):
        return {}


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_files_leave_out_every_optimizer_of_the_model_that_holds_parts(tmp_path):
    model = Pair()
    model(X)
    with ft.tune(model, "**/kernel[:, :2]", "**/bias[:1]"):
        model.compile("sgd", "mse")
        for optimizer in (*model.optimizers_of_parts, model.other_optimizer):
            optimizer.build(model.trainable_variables)
    model.save(tmp_path / "pair.keras")
    other = Pair()
    other(X)
    for optimizer in (*other.optimizers_of_parts, other.other_optimizer):
        optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "pair.keras")
    for a, b in zip(model.get_weights(), other.get_weights()):
        np.testing.assert_array_equal(a, b)


if BACKEND == "tensorflow":
    import tensorflow as tf

    class Traced(L.Layer):
        """A layer whose call, and a method of it, TensorFlow compiles."""

        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")

        @tf.function
        def call(self, x):
            return self.product(x) + 0.1 * tf.reduce_sum(self.kernel)

        @tf.function
        def product(self, x):
            return tf.matmul(x, self.kernel)

    class Plain(Traced):
        def call(self, x):
            return tf.matmul(x, self.kernel) + 0.1 * tf.reduce_sum(self.kernel)

    @pytest.mark.parametrize("where", ["[:, :2]", "[[0, 3, 4]]"])
    @pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
    def test_layers_that_are_compiled_themselves_train_before_during_and_after(where, eager):
        results = []
        for kind in (Traced, Plain):
            keras.utils.set_random_seed(3)
            model = keras.Sequential([keras.Input((8,)), L.Dense(8, name="a"), kind(name="own")])
            model(X)  # traced before
            seen = []
            with ft.tune(model, f"own/kernel{where}", "a/bias") as tuning:
                model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eager)
                model.fit(X, Y, epochs=2, verbose=0, shuffle=False)
                seen += [np.array(model(X)), tuning.patch["own/kernel"].new]
                assert tuning.verify() and tuning.patch["own/kernel"].moved
            seen.append(np.array(model(X)))
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eager)
            model.fit(X, Y, verbose=0, shuffle=False)
            results.append([*seen, *model.get_weights()])
        for traced, plain in zip(*results):
            np.testing.assert_allclose(traced, plain, rtol=1e-5, atol=1e-6)
