"""Stop gradients at a layer under a condition; leave out outliers; switch off attention heads. All at run time."""

import keras
import numpy as np
from proof import equal, numbers, unchanged

import finetooth as ft

rng = np.random.default_rng(0)
x, y = rng.normal(size=(60, 6)).astype("float32"), rng.normal(size=(60, 4)).astype("float32")

# 1. A wrapper around a layer: "frozen" closes its own weights, "stop" also the way to those below.
for closed, below_trains in (("frozen", True), ("stop", False)):
    below, layer = keras.layers.Dense(4, "tanh"), keras.layers.Dense(4)
    learn = keras.Variable(False, dtype="bool", trainable=False)
    model = keras.Sequential(
        [keras.Input((6,)), below, ft.Gate(layer, when=learn, closed=closed), keras.layers.Dense(4)]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    weights = [below.kernel, layer.kernel, model.layers[-1].kernel]
    before = [numbers(v) for v in weights]
    for opened, trains in ((False, (below_trains, False, True)), (True, (True, True, True))):
        learn.assign(opened)
        model.fit(x, y, verbose=0)
        after = [numbers(v) for v in weights]
        if [bool((a != b).any()) for a, b in zip(before, after)] != [*trains]:
            raise SystemExit("Not what was promised.")
        before = after

# 2. Outliers, by their own loss in this very step: the same as training on the others alone.
y[::10] = 1e6
body = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)])
reference = keras.models.clone_model(body)
reference.set_weights(body.get_weights())
reference.compile(keras.optimizers.SGD(0.1), "mse")
inlier = np.arange(60) % 10 > 0
reference.fit(x[inlier], y[inlier], batch_size=54, epochs=5, verbose=0)

data, target = keras.Input((6,)), keras.Input((4,))
error = keras.ops.mean(keras.ops.square(body(data) - target), axis=-1)
model = keras.Model([data, target], ft.Gate(body, closed="stop")(data, when=error < 100.0))
model.compile(keras.optimizers.SGD(0.1 * 60 / 54), "mse")  # the loss is the mean over all, outliers included
model.fit([x, y], y, batch_size=60, epochs=5, verbose=0)
equal("outliers left out", body.layers[0].kernel, numbers(reference.layers[0].kernel))

# 3. Heads: switched off altogether, or held fast ("frozen"). Nothing moves a head that is off.
sequences = rng.normal(size=(16, 5, 6)).astype("float32")
heads = keras.Variable([1.0, 1.0, 0.0, 1.0], trainable=False)
attention = keras.layers.MultiHeadAttention(num_heads=4, key_dim=3)
data = keras.Input((5, 6))
model = keras.Model(data, ft.Gate(attention, when=heads, closed="skip", per_head=True)(data, data))
model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "mse")
kernel = attention.query_dense.kernel
before = numbers(kernel)
model.fit(sequences, sequences, epochs=3, verbose=0)
unchanged(before, kernel, np.broadcast_to(numbers(heads)[:, None] > 0, kernel.shape))
