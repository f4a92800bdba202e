"""Training on two devices is training on one: a program of its own, as devices are set up before anything else."""

import sys

import keras
import numpy as np

import finetooth as ft

X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(64, 4)).astype("float32")


def trained(strategy, tuned):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(16, "relu", name="hidden"), keras.layers.Dense(4, name="head")]
        model = keras.Sequential([keras.Input((8,)), *layers])
        before = [v.numpy() for v in model.weights]
        part = ft.select(model, "hidden/kernel[:, :3]", "head/kernel[[1, 5]]", "head/bias")
        optimizer = keras.optimizers.AdamW(0.05)
        tuning = ft.tune(model, part) if tuned else None
        model.compile(optimizer if tuned else ft.SelectiveOptimizer(optimizer, part), "mse")
        model.fit(X, Y, batch_size=16, epochs=3, shuffle=False, verbose=0)
        if tuning:
            kernel = model.get_layer("hidden").kernel
            for copy in getattr(kernel._value, "values", [kernel._value]):  # each device's own holds the merged values
                np.testing.assert_array_equal(copy.numpy(), kernel.numpy())
            tuning.finish()
    return before, [v.numpy() for v in model.weights]


def main():
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    tuned = "tune" in sys.argv
    before, one = trained(tf.distribute.get_strategy(), tuned)
    _, two = trained(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), tuned)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(one, two))
    frozen = [[np.delete(w[0], np.s_[:3], 1), np.delete(w[2], [1, 5], 0), w[1]] for w in (before, two)]
    moved = sum(int((a.view("uint32") != b.view("uint32")).sum()) for a, b in zip(*frozen))
    print(f"largest difference {difference:.1e}, frozen elements moved {moved}")
    return int(difference > 1e-5 or moved > 0 or (one[0] == before[0]).all())


if __name__ == "__main__":
    sys.exit(main())
