"""The frozen prefix: computed once, kept exactly or refused, trained above as the whole model would be."""

import gc

import keras
import numpy as np
import pytest
from halves import check_a_failing_split, data, trained
from helpers import moved_inside, moved_outside, values
from traces import graph_of, state_of

import finetooth as ft
from finetooth.display.format import parse_size
from finetooth.keras_internals import private as keras_private
from finetooth.regions import bits
from finetooth.tuning.feature_store import feature_store

L = keras.layers


# Models, each with a selection that leaves something below it.


def residual(policy="float32"):
    """Two tensors cross a cut above `b`: what the first addition makes, and what `a` makes."""
    inputs = keras.Input((6,))
    a = L.Dense(8, "tanh", name="a", dtype=policy)(inputs)
    x = L.LayerNormalization(name="norm", dtype=policy)(a)
    x = L.Add(name="sum", dtype=policy)([L.Dense(8, "tanh", name="b", dtype=policy)(x), a])
    x = L.Dense(8, "tanh", name="c", dtype=policy)(x)
    x = L.Add(name="total", dtype=policy)([x, a])
    return keras.Model(inputs, L.Dense(3, name="out", dtype=policy)(x))


def bfloat16():
    return residual("bfloat16")


def sequential():
    return keras.Sequential(
        [keras.Input((6,)), L.Dense(8, "tanh", name="a"), L.Dense(8, "tanh", name="b"), L.Dense(3, name="out")]
    )


def images():
    inputs = keras.Input((6, 6, 2))
    x = L.Conv2D(4, 3, activation="relu", name="low")(inputs)
    x = L.BatchNormalization(name="norm")(x)
    x = L.Conv2D(4, 3, activation="relu", name="high")(x)
    return keras.Model(inputs, L.Dense(3, name="out")(L.Flatten()(x)))


def two_outputs():
    """`y` is made below the cut that `z` needs."""
    inputs = {"p": keras.Input((6,), name="p"), "q": keras.Input((2,), name="q")}
    x = L.Dense(5, "tanh", name="mix")(L.Concatenate(name="both")([inputs["p"], inputs["q"]]))
    return keras.Model(inputs, {"y": L.Dense(3, name="y")(x), "z": L.Dense(1, name="z")(x * inputs["q"][:, :1])})


def shared_layer():
    """One layer is called below and above the cut."""
    inputs = keras.Input((6,))
    layer = L.Dense(6, "tanh", name="twice")
    x = L.Dense(6, "tanh", name="mid")(layer(inputs) + 1.0)
    return keras.Model(inputs, L.Dense(3, name="out")(layer(x)))


def nested():
    inner = keras.Sequential([keras.Input((6,)), L.Dense(6, "tanh", name="a"), L.Dense(6, name="b")], name="inner")
    inputs = keras.Input((6,))
    return keras.Model(inputs, L.Dense(3, name="out")(inner(L.Dense(6, "tanh", name="first")(inputs))))


MODELS = {
    # name: how it is made, what is selected, input shapes, which layers make the tensors at the cut
    "whole layers": (residual, ["c/*", "out/*"], [(6,)], ["sum", "a"]),
    "slices, by rule": (residual, ["c/kernel[:, :3]", "out/kernel[2:5]"], [(6,)], ["sum", "a"]),
    "elements, composed": (residual, ["c/kernel[[0, 3], [1, 2]]", "c/bias[2:]"], [(6,)], ["sum", "a"]),
    "bfloat16": (bfloat16, ["c/kernel[:, :3]"], [(6,)], ["sum", "a"]),
    "sequential": (sequential, ["b/kernel[::2]", "out/*"], [(6,)], ["a"]),
    "convolution": (images, ["high/kernel[..., 1:3]", "out/bias"], [(6, 6, 2)], ["norm"]),
    "shared layer": (shared_layer, ["mid/*[:3]"], [(6,)], ["add"]),
    "nested model, cut through": (nested, ["inner/b/kernel[:2]"], [(6,)], ["inner/a"]),
    "nested model, above": (nested, ["inner/a/kernel[:2]"], [(6,)], ["first"]),
    "nested model, below": (nested, ["out/kernel[:2]"], [(6,)], ["inner"]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_training_above_the_cut_is_training_the_model(kind):
    make, selection, shapes, makers = MODELS[kind]
    x, y = data(*shapes, (3,))
    keras.utils.set_random_seed(0)
    start = values(make())
    plain, plain_history, _ = trained(make, selection, x, y, by_halves=False)
    model, history, split = trained(make, selection, x, y, by_halves=True)
    a, b = values(plain), values(model)
    # The very same operations on PyTorch; a compiler fuses those of a model and of its half differently.
    exact = keras.backend.backend() == "torch"
    rounding = 2.0**-7 if make is bfloat16 else 1e-5
    np.testing.assert_allclose(history["loss"], plain_history["loss"], rtol=0 if exact else rounding)
    for path in a:
        assert not exact or not bits.differing(a[path], b[path]).any(), path
        pair = (value.astype("float32") for value in (b[path], a[path]))
        np.testing.assert_allclose(*pair, rtol=rounding, atol=rounding / 10, err_msg=path)
    assert all(moved_inside(start, b, ft.select(model, *selection)).values())
    assert [row[0] for row in split.table().rows] == makers


def test_several_inputs_and_outputs_by_name():
    p, q, y, z = data((6,), (2,), (3,), (1,))
    results = []
    for by_halves in (False, True):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = two_outputs()
        with ft.tune(model, "z/*") as tuning:
            split = tuning.split()
            assert split.upper.output_names == model.output_names
            trainee = split.upper if by_halves else model
            inputs = split.features({"p": p, "q": q}, verbose=0) if by_halves else {"p": p, "q": q}
            trainee.compile(keras.optimizers.Adam(0.01), {"y": "mse", "z": "mae"}, loss_weights={"y": 0.5, "z": 2.0})
            fit = trainee.fit(inputs, {"y": y, "z": z}, epochs=3, batch_size=10, shuffle=False, verbose=0)
        results.append((values(model), fit.history))
    for path, value in results[0][0].items():
        np.testing.assert_allclose(results[1][0][path], value, rtol=1e-5, atol=1e-6)
    assert results[0][1].keys() == results[1][1].keys() == {"loss", "y_loss", "z_loss"}
    for name, losses in results[0][1].items():
        np.testing.assert_allclose(results[1][1][name], losses, rtol=1e-5)


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16", "mixed_float16"])
def test_features_keep_the_bits_of_their_own_dtype(policy, tmp_path):
    (x,) = data((6,))
    keras.config.set_dtype_policy(policy)
    try:
        model = residual(None)
    finally:
        keras.config.set_dtype_policy("float32")
    with ft.tune(model, "c/kernel[:, :3]") as tuning:
        split = tuning.split()
        expected = split.lower.predict(x, batch_size=10, verbose=0)
        in_memory = split.features(x, batch_size=10, verbose=0)
        on_disk = split.features(x, batch_size=10, folder=tmp_path / "kept", verbose=0)
        assert split.upper.dtype_policy == model.dtype_policy  # by which `compile` scales the loss
        for features in (in_memory, on_disk):
            dtypes = {keras.backend.standardize_dtype(array.dtype) for array in features}
            assert dtypes == {policy.removeprefix("mixed_")}
            assert not any(bits.differing(array, direct).any() for array, direct in zip(features, expected))
        assert all(isinstance(array, np.memmap) for array in on_disk)


def test_dropout_above_the_cut_draws_the_same_numbers():
    def make():
        inputs = keras.Input((6,))
        x = L.Dropout(0.5, seed=3, name="drop")(L.Dense(8, "tanh", name="b")(L.Dense(8, "tanh", name="a")(inputs)))
        return keras.Model(inputs, L.Dense(3, name="out")(x))

    x, y = data((6,), (3,))
    plain, *_ = trained(make, ["b/*"], x, y, by_halves=False)
    model, *_ = trained(make, ["b/*"], x, y, by_halves=True)
    for path, value in values(plain).items():
        np.testing.assert_allclose(values(model)[path], value, rtol=1e-5, atol=1e-6)


def test_statistics_above_the_cut_move_as_asked():
    x, y = data((6, 6, 2), (3,))
    results = []
    for by_halves in (False, True):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = images()
        with ft.tune(model, "norm/gamma[:2]", statistics="update") as tuning:
            trainee = tuning.split().upper if by_halves else model
            inputs = tuning.split().features(x, verbose=0) if by_halves else x
            trainee.compile("adam", "mse")
            trainee.fit(inputs, y, batch_size=10, shuffle=False, verbose=0)
        assert tuning.verify() and tuning.patch["norm/moving_mean"].moved == 4
        results.append(values(model))
    for path, value in results[0].items():
        np.testing.assert_allclose(results[1][path], value, rtol=1e-5, atol=1e-6)


# What features are made of.


class Batches(keras.utils.PyDataset):
    def __init__(self, *arrays):
        super().__init__()
        self.arrays = arrays

    @property
    def num_batches(self):
        return 3

    def __getitem__(self, index):
        return tuple(array[8 * index : 8 * index + 8] for array in self.arrays)


def as_tf_data(*arrays):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays).batch(8)


def as_loader(*arrays):
    import torch

    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*map(torch.tensor, arrays)), batch_size=8)


def as_generator(*arrays):
    return (tuple(array[i : i + 8] for array in arrays) for i in range(0, 20, 8))


@pytest.mark.parametrize("source", [Batches, as_generator, as_tf_data, as_loader])
def test_batches_of_any_kind_are_gathered_with_their_targets(source, tmp_path):
    x, y, weight = data((6,), (3,), ())
    model = residual()
    with ft.tune(model, "c/*") as tuning:
        split = tuning.split()
        direct = split.lower.predict(x, batch_size=8, verbose=0)
        for folder in (None, tmp_path / "kept"):
            features, *labels = split.features(source(x, y, weight), folder=folder, verbose=0)
            for array, expected in zip((*features, *labels), (*direct, y, weight), strict=True):
                assert isinstance(array, np.memmap) == (folder is not None)
                np.testing.assert_array_equal(array, expected)
        features, targets = split.features(source(x, y), verbose=0)
        np.testing.assert_array_equal(features[1], direct[1])
        np.testing.assert_array_equal(targets, y)


def test_structured_targets_and_plain_inputs_in_batches():
    p, q, y, z = data((6,), (2,), (3,), (1,))
    model = two_outputs()
    with ft.tune(model, "z/*") as tuning:
        split = tuning.split()
        whole = split.features({"p": p, "q": q}, batch_size=10, verbose=0)
        halves = [{"p": p[i : i + 10], "q": q[i : i + 10]} for i in (0, 10)]
        targets = [{"y": y[i : i + 10], "z": z[i : i + 10]} for i in (0, 10)]
        features, gathered = split.features(zip(halves, targets), verbose=0)
        np.testing.assert_array_equal(gathered["y"], y)
        np.testing.assert_array_equal(gathered["z"], z)
        for a, b, c in zip(whole, features, split.features(iter(halves), verbose=0)):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c)


if keras.backend.backend() != "jax":  # which has no float64 unless told so for the whole process

    def test_arrays_are_read_as_fit_reads_them():
        """`fit` makes float64 arrays float32, also for a layer that would take more."""
        inputs = keras.Input((6,), dtype="float64")
        x = L.Rescaling(1e9, -1e9, name="a", dtype="float64")(inputs)
        model = keras.Model(inputs, L.Dense(2, name="c")(L.Dense(4, name="b")(x)))
        x = 1 + 1e-9 * np.random.default_rng(0).normal(size=(20, 6))
        with ft.tune(model, "c/*") as tuning:
            split = tuning.split()
            features = split.features(x, verbose=0)
            np.testing.assert_array_equal(features, split.lower.predict(x, verbose=0))
            assert (features != split.lower.predict_on_batch(x)).any()
            for tensors in (x.astype("float32"), keras.ops.convert_to_tensor(x)):
                np.testing.assert_array_equal(features, split.features(tensors, verbose=0))


def test_sequences_of_any_one_length():
    inputs = keras.Input((None, 4))
    x = L.Dense(5, name="a")(inputs)
    model = keras.Model(inputs, L.Dense(2, name="b")(L.GlobalAveragePooling1D()(x)))
    with ft.tune(model, "b/*") as tuning:
        split = tuning.split()
        assert split.example_bytes == 5 * 4 and "pooling" in repr(split)
    with ft.tune(model, "a/kernel[0]") as tuning, pytest.raises(ft.TuningError, match="no frozen prefix.*'a'"):
        tuning.split()
    model = keras.Model(inputs, L.Dense(2, name="c")(L.Dense(5, name="d")(inputs)))
    with ft.tune(model, "c/*") as tuning:
        split = tuning.split()
        assert split.example_bytes is None and "by length" in repr(split) and "by length" in str(split)
        (x,) = data((7, 4))
        assert split.features(x, verbose=0).shape == (20, 7, 5)
        with pytest.raises(ft.TuningError, match=r"\(7, 5\)"):
            split.features(iter([x, x[:, :6]]), verbose=0)


# Bounds.


def test_a_bound_is_checked_before_anything_is_computed_or_written(tmp_path):
    (x,) = data((6,), n=1000)
    model = residual()
    with ft.tune(model, "c/*") as tuning:
        split = tuning.split()
        batches = []
        split.lower.predict_on_batch = lambda x, original=split.lower.predict_on_batch: (
            batches.append(len(x)) or original(x)
        )
        assert split.example_bytes == 2 * 8 * 4
        with pytest.raises(
            ft.TuningError, match=r"1,000 examples take 62.5 KiB, 64 B each; memory= .* 60.0 KiB.*folder"
        ):
            split.features(x, memory="60 KiB", verbose=0)
        with pytest.raises(ft.TuningError, match=r"disk= allows 10.0 KiB"):
            split.features(x, folder=tmp_path / "a" / "b", disk=10 * 1024, verbose=0)
        assert list(tmp_path.iterdir()) == [] and batches == [32, 32]
        with pytest.raises(ft.TuningError, match="memory="):
            split.features(as_generator(x), memory="1 kB", verbose=0)  # three batches of 8, of unknown number
        assert batches == [32, 32, 8, 8]
        with pytest.raises(ft.TuningError, match="memory="):
            split.features(Batches(x), memory="1 kB", verbose=0)  # known to be more than 16
        assert batches == [32, 32, 8, 8, 8]
        assert len(split.features(x, memory=64_000, folder=None, verbose=0)[0]) == 1000
        assert len(split.features(x, folder=tmp_path / "a" / "b", disk=64_000, verbose=0)[0]) == 1000


@pytest.mark.parametrize("bound", ["2 GX", "GiB", 0, -1, None, "-1 GiB", "1.5.2 GB"])
def test_a_bound_that_makes_no_sense(bound):
    with pytest.raises(ft.TuningError, match="GiB"), feature_store(("memory", bound), None):
        pass


def test_bounds_in_words():
    assert [parse_size(text) for text in ("7 B", "2kb", "1.5 MiB", "3 GB", " 1 TiB ")] == [
        7, 2000, 3 * 2**19, 3 * 10**9, 2**40,
    ]  # fmt: skip


def test_files_are_whole_or_not_there(tmp_path):
    x, y = data((6,), (3,))
    model = residual()
    with ft.tune(model, "c/*") as tuning:
        split = tuning.split()

        def breaking():
            yield x, y
            assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
                f"{name}.npy.partial" for name in ("features_0", "features_1", "targets_0")
            ]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            split.features(breaking(), folder=tmp_path / "kept", verbose=0)
        assert list(tmp_path.iterdir()) == []
        first = split.features(x, folder=tmp_path / "kept", verbose=0)
        assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["features_0.npy", "features_1.npy"]
        np.testing.assert_array_equal(np.load(tmp_path / "kept" / "features_1.npy"), first[1])
        with pytest.raises(ft.TuningError, match="one folder for each"):
            split.features(x, folder=tmp_path / "kept", verbose=0)
        first[0][:] = 0  # the arrays are the caller's, the files are not
        assert np.load(tmp_path / "kept" / "features_0.npy").any()
    with ft.tune(model, "c/*") as tuning:
        again = tuning.split().features(x[:5], folder=tmp_path / "kept", verbose=0)
        np.testing.assert_array_equal(again[1], first[1][:5])
        assert np.load(tmp_path / "kept" / "features_0.npy").shape == (5, 8)


def test_a_failure_while_files_get_their_names_leaves_none_behind(tmp_path):
    (x,) = data((6,))
    model = residual()
    (tmp_path / "features_1.npy" / "in the way").mkdir(parents=True)
    with ft.tune(model, "c/*") as tuning, pytest.raises(OSError):
        tuning.split().features(x, folder=tmp_path, verbose=0)
    assert [path.name for path in tmp_path.iterdir()] == ["features_1.npy"]


def test_progress_is_shown_unless_it_is_not_wanted(capsys):
    (x,) = data((6,))
    model = residual()
    with ft.tune(model, "c/*") as tuning:
        tuning.split().features(x, batch_size=8, verbose=0)
        assert capsys.readouterr().out == ""
        tuning.split().features(x, batch_size=8)
        assert "3/3" in capsys.readouterr().out


# What cannot be kept.


class Noise(L.Layer):
    """As users write it: with a seed generator of its own, in training only."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x, training=False):
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seeds) if training else x


class Counting(L.Layer):
    """A statistic: frozen, so it does not move while tuned."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, x, training=False):
        if training:
            self.seen.assign(self.seen + 1.0)
        return x + self.seen


class Drifting(L.Layer):
    """Assigns to what was made to be trained, which nothing expects."""

    def build(self, shape):
        self.gain = self.add_weight(shape=(), initializer="ones", name="gain")

    def call(self, x, training=False):
        if training:
            self.gain.assign(self.gain * 0.5)
        return x


def test_what_a_frozen_layer_assigns_is_dropped_so_its_features_are_exact():
    model = guarded_model(Drifting(name="odd"))
    (x,) = data((6,))
    with ft.tune(model, "out/*") as tuning:
        split = tuning.split()
        features = split.features(x, verbose=0)
        model(x, training=True)
        np.testing.assert_array_equal(features, split.lower.predict(x, verbose=0))
        assert float(keras.ops.convert_to_numpy(model.get_layer("odd").gain)) == 1 and tuning.verify()


class Penalised(L.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return x


class Trained(L.Layer):
    """Something else in training, by no random number."""

    def call(self, x, training=False):
        return 2 * x if training else x


class Centred(L.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


class RunningSum(L.Layer):
    """The first example of a batch depends on no other."""

    def call(self, x):
        return keras.ops.cumsum(x, axis=0)


class Total(L.Layer):
    """Has no axis of examples."""

    def call(self, x):
        return keras.ops.ones((3, 6))


GUARDED = {
    "dropout": (lambda: L.Dropout(0.5, name="odd"), "'odd' draws random numbers"),
    "noise": (lambda: L.GaussianNoise(0.1, name="odd"), "'odd' draws random numbers"),
    "augmentation": (
        lambda: keras.Sequential([L.Reshape((3, 2, 1)), L.RandomFlip(name="odd"), L.Reshape((6,))]),
        "'odd' draws random numbers",
    ),
    "dropout of a recurrent layer": (
        lambda: keras.Sequential([L.Reshape((3, 2)), L.SimpleRNN(6, dropout=0.2, name="odd")]),
        "draws random numbers",
    ),
    "a layer's own noise": (lambda: Noise(name="odd"), "'odd' draws random numbers"),
    "activity regularizer": (lambda: L.Dense(6, activity_regularizer="l2", name="odd"), "'odd' adds to the loss"),
    "added loss": (lambda: Penalised(name="odd"), "'odd' adds to the loss"),
    "other in training": (lambda: Trained(name="odd"), "'odd' computes in training something else"),
    "mixed examples": (lambda: Centred(name="odd"), "'odd' mixes the examples"),
    "mixed, not for the first": (lambda: RunningSum(name="odd"), "'odd' mixes the examples"),
}


def guarded_model(layer):
    inputs = keras.Input((6,))
    x = L.Dense(6, name="first")(inputs)
    x = L.Dense(6, name="last")(layer(x))
    return keras.Model(inputs, L.Dense(3, name="out")(x))


@pytest.mark.parametrize("kind", GUARDED)
def test_what_would_not_be_exact_is_refused(kind):
    make, message = GUARDED[kind]
    (x,) = data((6,))
    model = guarded_model(make())
    model(x, training=True)  # Keras' recurrent cells get an attribute by it
    before = values(model), [np.array(keras.ops.convert_to_numpy(v)) for v in model.variables], state_of(model)
    with ft.tune(model, "out/*") as tuning:
        with pytest.raises(ft.TuningError, match=message):
            tuning.split().features(x, verbose=0)
        assert all(layer.losses == [] for layer in model.layers)
    assert moved_outside(before[0], values(model), ft.select(model, "out/*")) == {}
    for a, b in zip(before[1], model.variables):  # seeds among them
        np.testing.assert_array_equal(a, keras.ops.convert_to_numpy(b))
    assert state_of(model) == before[2]
    with ft.tune(model, "first/*") as tuning, pytest.raises(ft.TuningError, match="no frozen prefix"):
        tuning.split()


@pytest.mark.parametrize(
    "make",
    [
        lambda: L.Dropout(0.0),
        lambda: L.BatchNormalization(),
        lambda: keras.Sequential([L.Reshape((3, 2)), L.SimpleRNN(6)]),  # holds a seed generator and draws nothing
        lambda: L.SpectralNormalization(L.Dense(6)),
        lambda: Counting(),
        lambda: L.Dense(6, kernel_regularizer="l2"),
    ],
    ids=["no dropout", "statistics", "recurrent", "spectral", "counting", "regularizer"],
)
def test_what_is_exact_is_not_refused(make):
    (x,) = data((6,))
    model = guarded_model(make())
    with ft.tune(model, "out/*") as tuning:
        split = tuning.split()
        predicted = split.upper.predict(split.features(x, verbose=0), verbose=0)
        np.testing.assert_allclose(predicted, model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def test_a_layer_that_reads_what_is_trained_without_holding_it():
    """It cannot be seen in the graph, so the first examples are run with other weights too."""
    head = L.Dense(6, use_bias=False, name="head")
    head.build((None, 6))
    inputs = keras.Input((6,))
    tied = L.Lambda(lambda x: keras.ops.matmul(x, head.kernel), output_shape=(6,), name="tied")
    model = keras.Model(inputs, head(L.Activation("tanh", name="act")(tied(inputs))))
    (x,) = data((6,))
    for part in ("head/kernel", "head/kernel[:, :2]"):
        with ft.tune(model, part) as tuning, pytest.raises(ft.TuningError, match="'tied'.*weights being trained"):
            tuning.split().features(x, verbose=0)


def test_masks_are_refused():
    inputs = keras.Input((5,), dtype="int32")
    x = L.Embedding(9, 4, mask_zero=True, name="tokens")(inputs)
    model = keras.Model(inputs, L.Dense(2, name="out")(L.GlobalAveragePooling1D()(L.Dense(3, name="read")(x))))
    tokens = np.random.default_rng(0).integers(0, 9, (20, 5))
    with ft.tune(model, "read/*") as tuning, pytest.raises(ft.TuningError, match="'tokens'.*mask"):
        tuning.split().features(tokens, verbose=0)
    with ft.tune(model, "out/*") as tuning:  # below this cut the mask has been used up
        assert tuning.split().features(tokens, verbose=0).shape == (20, 3)
    inner = keras.Sequential([keras.Input((5,), dtype="int32"), L.Embedding(9, 4, mask_zero=True)], name="inner")
    model = keras.Model(
        inputs, L.Dense(2, name="out")(L.GlobalAveragePooling1D()(L.Dense(3, name="read")(inner(inputs))))
    )
    with ft.tune(model, "read/*") as tuning, pytest.raises(ft.TuningError, match="'inner'.*mask"):
        tuning.split().features(tokens, verbose=0)


def test_a_tensor_without_an_axis_of_examples_is_refused():
    inputs = keras.Input((6,))
    x = L.Dense(6, name="first")(inputs)
    model = keras.Model(inputs, L.Dense(3, name="out")(L.Dense(6, name="last")(x)[:, None] * Total(name="odd")(x)))
    (x,) = data((6,))
    with ft.tune(model, "last/*") as tuning, pytest.raises(ft.TuningError, match=r"'odd' .* 20 examples .*\(3, 6\)"):
        tuning.split().features(x, verbose=0)


def test_what_cannot_be_split():
    class OwnStep(keras.Model):
        def train_step(self, *args):
            raise NotImplementedError

    class OwnLoss(keras.Model):
        def compute_loss(self, *args, **kwargs):
            raise NotImplementedError

    class OwnMetrics(keras.Model):
        def compute_metrics(self, *args, **kwargs):
            raise NotImplementedError

    class OwnTest(keras.Sequential):
        def test_step(self, *args):
            raise NotImplementedError

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = L.Dense(6, name="a"), L.Dense(6, name="b")

        def call(self, x):
            return self.b(self.a(x))

    inputs = keras.Input((6,))
    outputs = L.Dense(6, name="b")(L.Dense(6, name="a")(inputs))
    own = [kind(inputs, outputs) for kind in (OwnStep, OwnLoss, OwnMetrics)]
    own.append(OwnTest([inputs, L.Dense(6, name="a"), L.Dense(6, name="b")]))
    subclassed = Subclassed()
    subclassed(np.ones((2, 6)))
    for model in (*own, subclassed):
        with (
            ft.tune(model, "b/*") as tuning,
            pytest.raises(ft.TuningError, match=f"{type(model).__name__}, has a call"),
        ):
            tuning.split()
    functional = residual()
    functional.extra = L.Dense(2, name="extra")  # not in the graph
    functional.extra.build((None, 2))
    with ft.tune(functional, ft.select(functional, "extra/*", "out/*")) as tuning:
        with pytest.raises(ft.TuningError, match=r"extra/bias.*no layer in its graph"):
            tuning.split()
    model = nested()
    with ft.tune(model, "first/*") as tuning, pytest.raises(ft.TuningError, match="no frozen prefix: 'first'"):
        tuning.split()
    layer = L.Dense(6, name="twice")
    x = layer(inputs)
    model = keras.Model(inputs, [x, layer(L.Dense(6, name="mid")(x))])
    with ft.tune(model, "mid/*") as tuning, pytest.raises(ft.TuningError, match=r"\['twice', 'twice'\]"):
        tuning.split()


def test_fit_would_round_features_that_are_wider_than_floatx():
    model = residual()
    (x,) = data((6,))
    with ft.tune(model, "out/*") as tuning:
        keras.config.set_floatx("float16")
        try:
            with pytest.raises(ft.TuningError, match="is float32.*float16.*set_floatx"):
                tuning.split()
        finally:
            keras.config.set_floatx("float32")
        assert tuning.split().features(x, verbose=0).dtype == np.float32


def test_examples_that_are_none_or_do_not_fit():
    p, q = data((6,), (2,))
    model = two_outputs()
    with ft.tune(model, "z/*") as tuning:
        split = tuning.split()
        with pytest.raises(ft.TuningError, match=r"\[10, 20\]"):
            split.features({"p": p, "q": q[:10]}, verbose=0)
        for empty in ({"p": p[:0], "q": q[:0]}, iter([])):
            with pytest.raises(ft.TuningError, match="no examples"):
                split.features(empty, verbose=0)


if keras.backend.backend() == "torch":

    def test_the_state_of_a_pytorch_module_is_put_back():
        import torch

        module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))
        model = guarded_model(L.TorchModuleWrapper(module, output_shape=(None, 6), name="odd"))
        before = {name: value.clone() for name, value in module.state_dict().items()}
        (x,) = data((6,))
        with ft.tune(model, "out/*") as tuning, pytest.raises(ft.TuningError, match="'odd' computes in training"):
            tuning.split().features(x, verbose=0)
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


# While tuned, and afterwards.


@pytest.mark.parametrize(
    ("make", "way"),
    [(residual, "revert"), (images, "finish"), (nested, "exception"), (shared_layer, "finish"), (sequential, "finish")],
)
def test_no_trace_is_left(make, way):
    shapes = [(6, 6, 2) if make is images else (6,), (3,)]
    x, y = data(*shapes)
    model = make()
    before, graph, start = state_of(model), graph_of(model), values(model)
    tuning = ft.tune(model, "out/kernel[:2]")
    split = tuning.split()
    assert tuning.split() is split
    split.upper.compile("adam", "mse")
    split.upper.fit(split.features(x, verbose=0), y, verbose=0)
    if way == "exception":
        with pytest.raises(RuntimeError), tuning:
            raise RuntimeError
    else:
        getattr(tuning, way)()
    assert state_of(model) == before and graph_of(model) == graph
    moved = moved_inside(start, values(model), tuning.selection)["out/kernel"]
    assert (moved == 0) == (way == "revert")
    assert moved_outside(start, values(model), tuning.selection) == {}


def test_a_split_that_fails_leaves_no_trace(monkeypatch):
    check_a_failing_split(residual(), "c/*", data((6,))[0], (20, 8), monkeypatch)


def test_models_that_others_make_of_the_layers_meanwhile_stay_right():
    x, y = data((6,), (3,))
    model = residual()
    with ft.tune(model, "out/*") as tuning:
        tuning.split()
        inputs = keras.Input((8,))
        other = keras.Model(inputs, model.get_layer("out")(inputs))
    copy = keras.Model.from_config(other.get_config())
    copy.set_weights(other.get_weights())
    features = data((8,))[0]
    np.testing.assert_array_equal(copy.predict(features, verbose=0), other.predict(features, verbose=0))


def test_after_the_tuning_the_upper_model_refuses_and_no_weight_is_lost():
    x, y = data((6,), (3,))
    model = residual()
    with ft.tune(model, "c/kernel[:, :3]") as tuning:
        split = tuning.split()
        features = split.features(x, verbose=0)
        split.upper.compile("adam", "mse")
        split.upper.fit(features, y, verbose=0)
    after = values(model)
    for use in (
        lambda: split.upper.fit(features, y, verbose=0),
        lambda: split.upper.train_on_batch(features, y),
        lambda: split.upper.evaluate(features, y, verbose=0),
        lambda: split.upper.predict(features, verbose=0),
        lambda: split.upper(features),
        lambda: split.upper.get_config(),
        lambda: split.features(x),
        lambda: tuning.split(),
    ):
        with pytest.raises(ft.TuningError, match="has ended"):
            use()
    for path, value in values(model).items():
        np.testing.assert_array_equal(value, after[path])
    assert "(finished)" in str(split)
    model.compile("adam", "mse")
    model.fit(x, y, verbose=0)


def test_the_upper_model_is_saved_and_restored_like_a_plain_one(tmp_path):
    x, y = data((6,), (3,))
    model = residual()
    with ft.tune(model, "c/kernel[:, :3]") as tuning:
        upper = tuning.split().upper
        features = tuning.split().features(x, verbose=0)
        assert [v.name for v in upper.trainable_variables] == ["kernel_part"]
        assert [id(v) for v in upper.trainable_variables] == [id(v) for v in model.trainable_variables]
        assert len(upper.get_weights()) == 4
        if keras.backend.backend() == "torch":
            raw = {id(keras_private.raw_value(v)) for v in upper.variables}
            assert {id(parameter) for parameter in upper.parameters()} == raw  # no merged copies
        upper.compile("adam", "mse")
        upper.fit(features, y, verbose=0)
        upper.save(tmp_path / "upper.keras")
        best = upper.get_weights()
        predicted = upper.predict(features, verbose=0)
        upper.fit(features, y, epochs=2, verbose=0)
        upper.set_weights(best)
        np.testing.assert_array_equal(upper.predict(features, verbose=0), predicted)
        np.testing.assert_allclose(model.predict(x, verbose=0), predicted, rtol=1e-5, atol=1e-6)
    loaded = keras.models.load_model(tmp_path / "upper.keras", compile=False)
    np.testing.assert_allclose(loaded.predict(features, verbose=0), predicted, rtol=1e-5, atol=1e-6)


def test_early_stopping_gives_the_best_weights_back():
    x, y = data((6,), (3,))
    model = residual()
    with ft.tune(model, "c/kernel[:, :3]") as tuning:
        upper = tuning.split().upper
        features = tuning.split().features(x, verbose=0)
        upper.compile(keras.optimizers.SGD(0.1), "mse")
        start = upper.evaluate(features, y, verbose=0)
        upper.optimizer.learning_rate = -0.5  # worse with every epoch
        stop = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
        history = upper.fit(features, y, epochs=9, batch_size=20, verbose=0, callbacks=[stop]).history["loss"]
        assert len(history) == 3 and history[0] == min(history)
        assert start < upper.evaluate(features, y, verbose=0) < history[2]
    assert tuning.verify()


def test_the_patch_is_current_within_an_epoch():
    x, y = data((6,), (3,))
    model = residual()
    seen = []
    with ft.tune(model, "c/kernel[:, :3]") as tuning:
        upper = tuning.split().upper

        def look(batch, logs):
            seen.append((tuning.patch["c/kernel"].new.copy(), bool(tuning.verify())))

        upper.compile("sgd", "mse")
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        upper.fit(tuning.split().features(x, verbose=0), y, batch_size=8, verbose=0, callbacks=[callback])
    assert len(seen) == 3 and all(verified for _, verified in seen)
    assert (seen[0][0] != seen[1][0]).all() and (seen[1][0] != seen[2][0]).all()
    np.testing.assert_array_equal(seen[2][0], tuning.patch["c/kernel"].new)


def test_a_step_that_fails_loses_no_weights():
    x, y = data((6,), (3,))
    model = residual()
    with ft.tune(model, "c/kernel[:, :3]") as tuning:
        split = tuning.split()
        features = split.features(x, verbose=0)
        before = values(model)

        def broken(y, p):
            raise RuntimeError("broken loss")

        split.upper.compile("adam", broken)
        with pytest.raises(RuntimeError, match="broken loss"):
            split.upper.fit(features, y, verbose=0)
        for path, value in values(model).items():
            np.testing.assert_array_equal(value, before[path])


def test_a_split_model_can_be_freed():
    model = residual()
    with ft.tune(model, "c/*") as tuning:
        tuning.split()
    del tuning
    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, keras.Model) and o.name.endswith("_upper")]


def test_the_upper_model_is_all_one_needs_to_hold():
    (x,) = data((6,))
    split = ft.tune(residual(), "c/*").split()
    upper, features = split.upper, split.features(x, verbose=0)
    del split
    gc.collect()
    upper.compile("sgd", "mse")
    before = np.array(upper.get_layer("c").kernel.numpy())
    upper.fit(features, np.ones((len(x), 3)), verbose=0)
    assert (upper.get_layer("c").kernel.numpy() != before).any()


def test_what_is_printed():
    model = residual()
    with ft.tune(model, "c/*", "out/*") as tuning:
        split = tuning.split()
        assert repr(split) == f"<Split of {model.name!r} after 'sum', 'a', 64 B per example>"
        text = str(split)
        assert "below, computed once: a, norm, b, sum" in text and "above, trained: c, total, out" in text
        assert "64 B" in text and "float32" in text and "<table>" in split._repr_html_() and split.__rich__()
    deep = keras.Sequential([keras.Input((2,)), *(L.Dense(2, name=f"d{i}") for i in range(30)), L.Dense(1, name="out")])
    with ft.tune(deep, "out/*") as tuning:
        assert "once: d0, d1, d2, d3, d4, d5, ..., d25, d26, d27, d28, d29" in " ".join(str(tuning.split()).split())


# The private names of Keras that this relies on.


def test_calls_come_after_those_they_depend_on():
    model = residual()
    calls = keras_private.calls_of(model)
    made = set()
    for call in calls:
        assert call.is_input or {id(tensor) for tensor in call.input_tensors} <= made
        made |= {id(tensor) for tensor in call.output_tensors}
    names = [call.operation.name for call in calls if not call.is_input]
    assert names == ["a", "norm", "b", "sum", "c", "total", "out"] and {id(t) for t in model.outputs} <= made
    assert [c.operation.name for c in keras_private.calls_of(sequential()) if not c.is_input] == ["a", "b", "out"]


def test_a_call_is_repeated_and_noted_in_both_lists():
    inputs, other = keras.Input((6,)), keras.Input((6,))
    layer = L.Dense(3, name="a")
    keras.Model(inputs, layer(inputs))
    (call,) = keras_private.calls_in(layer)
    made = keras_private.call_again(call, {id(inputs): other})
    assert keras_private.calls_in(layer)[-1].output_tensors[0] is made
    (origin,) = [t for t in keras_private.calls_in(layer)[-1].input_tensors]
    assert origin is other
    activation = L.Activation("tanh")
    activation(made)
    assert keras_private.calls_out(layer) == keras_private.calls_in(activation)
