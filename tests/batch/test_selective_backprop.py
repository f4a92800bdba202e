"""Selective backpropagation in `fit`: the step is that of the kept examples alone, and nothing else moves."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

import finetooth as ft

CROSSENTROPY = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)


def data(count=48, width=6, classes=3):
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, width)).astype("float32"), rng.integers(0, classes, count)


def network(optimizer=None, **compiled):
    """Batch normalisation, dropout, a regularizer, a metric: everything that a second forward pass could disturb."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,), name="features")
    x = layers.Dense(8, activation="relu", kernel_regularizer="l2", name="hidden")(inputs)
    x = layers.Dropout(0.3, seed=4)(layers.BatchNormalization()(x))
    model = keras.Model(inputs, layers.Dense(3, name="logits")(x))
    optimizer = optimizer or keras.optimizers.AdamW(1e-2, weight_decay=0.1)
    model.compile(optimizer, CROSSENTROPY(), metrics=["accuracy"], **compiled)
    return model


def plain(**compiled):
    """Without dropout, whose draws depend on the size of the batch."""
    keras.utils.set_random_seed(1)
    hidden = layers.Dense(8, activation="tanh", name="hidden")
    model = keras.Sequential([keras.Input((6,)), hidden, layers.Dense(3, name="logits")])
    model.compile(keras.optimizers.AdamW(1e-2, weight_decay=0.1), CROSSENTROPY(), metrics=["accuracy"], **compiled)
    return model


def losses(model, x, y):
    return ops.convert_to_numpy(CROSSENTROPY(reduction="none")(y, model(x, training=True)))


def state(model):
    return [np.array(v) for v in (*model.get_weights(), *(ops.convert_to_numpy(v) for v in model.optimizer.variables))]


def assert_same(a, b, **tolerance):
    for one, other in zip(state(a), state(b), strict=True):
        np.testing.assert_allclose(one, other, **(tolerance or {"rtol": 0, "atol": 0}))


def kept_by_hand(rule, k):
    """Which batches a plain model would have to be given, one after the other."""
    x, y = data()
    model = plain()
    for start in range(0, len(x), 16):
        batch_x, batch_y = x[start : start + 16], y[start : start + 16]
        kept = ops.convert_to_numpy(rule(losses(model, batch_x, batch_y), k))
        model.train_on_batch(batch_x[kept], batch_y[kept])
    return model


@pytest.mark.parametrize("rule", [ft.batch.hardest, ft.batch.easiest, functools.partial(ft.batch.middle, skip=0.2)])
def test_training_is_that_of_the_kept_examples_alone(rule):
    model = plain()
    with ft.selective_backprop(model, 0.25, rule):
        model.fit(*data(), batch_size=16, shuffle=False, verbose=0)
    assert_same(model, kept_by_hand(rule, 4), rtol=1e-5, atol=1e-7)
    other = kept_by_hand(ft.batch.hardest if rule is not ft.batch.hardest else ft.batch.easiest, 4)
    assert max(np.abs(a - b).max() for a, b in zip(state(model), state(other))) > 1e-3  # the rule matters


def test_scoring_moves_no_statistics_and_no_seeds():
    """After one step everything but the drawn mask is as if the kept examples had been the batch, bit for bit."""
    x, y = data(16)
    selective, alone = network(), network()
    selective.get_layer("hidden").trainable = alone.get_layer("hidden").trainable = False
    kept = np.argsort(-losses(network(), x, y), kind="stable")[:4]  # drawn with the same seeds as the scores
    with ft.selective_backprop(selective, 0.25):
        selective.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    alone.fit(x[kept], y[kept], batch_size=4, shuffle=False, verbose=0)
    for one, other in zip(selective.non_trainable_variables, alone.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(one), ops.convert_to_numpy(other), err_msg=one.path)
    if keras.backend.backend() != "torch":  # whose dropout does not draw from the layer's seeds
        assert_same(selective, alone)


def test_metrics_are_of_the_whole_batch_counted_once():
    x, y = data()
    frozen = dict(optimizer=keras.optimizers.SGD(0.0))
    whole = plain()
    whole.compile(keras.optimizers.SGD(0.0), CROSSENTROPY(), metrics=["accuracy"])
    expected = whole.fit(x, y, batch_size=16, verbose=0, shuffle=False).history
    model = plain()
    model.compile(**frozen, loss=CROSSENTROPY(), metrics=["accuracy"])
    with ft.selective_backprop(model, 0.25):
        found = model.fit(x, y, batch_size=16, verbose=0, shuffle=False, validation_data=(x, y)).history
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6)
        np.testing.assert_allclose(found[f"val_{name}"], values, rtol=1e-6)
    assert found["kept_fraction"] == [0.25] and found["nan_losses"] == [0.0]
    assert not {"val_kept_fraction", "val_nan_losses"} & set(found)
    thresholds = [np.sort(losses(plain(), x[i : i + 16], y[i : i + 16]))[-4] for i in (0, 16, 32)]
    np.testing.assert_allclose(found["kept_threshold"], np.mean(thresholds), rtol=1e-5)


def nested():
    keras.utils.set_random_seed(2)
    a, b = keras.Input((4,), name="a"), keras.Input((5,), name="b")
    both = layers.Concatenate()([a, b])
    outputs = {"kind": layers.Dense(3, name="kind")(both), "sequence": layers.Reshape((2, 2))(layers.Dense(4)(both))}
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(
        keras.optimizers.Adam(1e-2),
        {"kind": CROSSENTROPY(), "sequence": "mse"},
        loss_weights={"kind": 1.0, "sequence": 0.5},
        metrics={"kind": ["accuracy"]},
    )
    return model


def test_nested_inputs_targets_and_weights():
    rng = np.random.default_rng(0)
    x = {"a": rng.normal(size=(12, 4)).astype("float32"), "b": rng.normal(size=(12, 5)).astype("float32")}
    y = {"kind": rng.integers(0, 3, 12), "sequence": rng.normal(size=(12, 2, 2)).astype("float32")}
    weights = {"kind": rng.random(12).astype("float32"), "sequence": rng.random((12, 2)).astype("float32")}
    model, alone, whole = nested(), nested(), nested()
    predicted = {name: ops.convert_to_numpy(value) for name, value in model(x).items()}
    kind = ops.convert_to_numpy(CROSSENTROPY(reduction="none")(y["kind"], predicted["kind"])) * weights["kind"]
    sequence = (((predicted["sequence"] - y["sequence"]) ** 2).mean(2) * weights["sequence"]).mean(1)
    kept = np.argsort(-(kind + 0.5 * sequence), kind="stable")[:6]
    some = [{name: values[kept] for name, values in part.items()} for part in (x, y, weights)]
    alone.fit(some[0], some[1], sample_weight=some[2], batch_size=6, shuffle=False, verbose=0)
    expected = whole.evaluate(x, y, sample_weight=weights, batch_size=12, return_dict=True, verbose=0)
    with ft.selective_backprop(model, 0.5):
        logs = model.fit(x, y, sample_weight=weights, batch_size=12, shuffle=False, verbose=0).history
    assert_same(model, alone)
    for name, value in expected.items():  # also the loss of each output
        np.testing.assert_allclose(logs[name], [value], rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"steps_per_execution": 2}, {"run_eagerly": True}])
def test_smaller_last_batches_and_ways_to_run(options, backend):
    if backend == "torch" and options:
        options = {"run_eagerly": True}  # it has no other way
    x, y = data(41)
    model, reference = plain(**options), plain()
    with ft.selective_backprop(model, 0.25):
        logs = model.fit(x, y, batch_size=16, shuffle=False, verbose=0).history
    for start, k in ((0, 4), (16, 4), (32, 2)):
        batch_x, batch_y = x[start : start + 16], y[start : start + 16]
        kept = np.argsort(-losses(reference, batch_x, batch_y), kind="stable")[:k]
        reference.train_on_batch(batch_x[kept], batch_y[kept])
    assert_same(model, reference, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(logs["kept_fraction"], [10 / 41], rtol=1e-6)


def test_a_step_is_traced_once_whatever_is_kept():
    traces = []

    class Counting(layers.Layer):
        def call(self, x):
            traces.append(1)
            return x

    model = keras.Sequential([keras.Input((6,)), Counting(), layers.Dense(3)])
    model.compile("adam", CROSSENTROPY())
    x, y = data(64)
    with ft.selective_backprop(model, 0.5, ft.batch.random, seed=1):
        model.fit(x, y, batch_size=16, verbose=0)
        first = len(traces)
        model.fit(x, y, batch_size=16, verbose=0, epochs=3)
    steps = 12 if keras.backend.backend() == "torch" else 0  # where nothing is traced each step runs, twice
    assert len(traces) - first == 2 * steps


def test_a_schedule_trains_on_whole_batches_in_between():
    x, y = data()
    model, reference = plain(), plain()
    with ft.selective_backprop(model, 0.25, when=ft.Schedule(start=1, end=4, every=2)):
        model.fit(x, y, batch_size=16, shuffle=False, epochs=2, verbose=0)
    for step in range(6):
        start = 16 * (step % 3)
        batch_x, batch_y = x[start : start + 16], y[start : start + 16]
        if step in (1, 3):
            kept = np.argsort(-losses(reference, batch_x, batch_y), kind="stable")[:4]
            batch_x, batch_y = batch_x[kept], batch_y[kept]
        reference.train_on_batch(batch_x, batch_y)
    assert_same(model, reference, rtol=1e-5, atol=1e-7)


def test_stale_scores_are_used_until_they_are_too_old():
    """Batches of 16 in three steps, scores good for three more: epochs 0 and 2 score, and 1 and 3 do not."""
    x, y = data()
    scored, table, reference = [], np.zeros(48, "float32"), plain()
    for step in range(12):
        ids = np.arange(16) + 16 * (step % 3)
        if step // 3 in (0, 2):
            table[ids] = losses(reference, x[ids], y[ids])
        kept = ids[np.argsort(-table[ids], kind="stable")[:4]]
        reference.train_on_batch(x[kept], y[kept])

    class Counting(layers.Layer):
        def call(self, x, training=False):
            if keras.backend.backend() == "torch" and training:
                scored.append(x.shape[0])
            return x

    inputs = keras.Input((6,), name="features")
    model = keras.Model([inputs], layers.Dense(3)(layers.Dense(8, activation="tanh")(Counting()(inputs))))
    model.set_weights(plain().get_weights())
    model.compile(keras.optimizers.AdamW(1e-2, weight_decay=0.1), CROSSENTROPY(), metrics=["accuracy"])
    with ft.selective_backprop(model, 0.25, score=ft.batch.Stale("id", examples=48, steps=4)):
        model.fit({"features": x, "id": np.arange(48)}, y, batch_size=16, shuffle=False, epochs=4, verbose=0)
    assert_same(model, reference, rtol=1e-4, atol=1e-6)
    if keras.backend.backend() == "torch":
        assert scored.count(16) == 6 and scored.count(4) == 12


def test_importance_weights_reach_the_loss():
    x, y = data(16)
    kept, weights = np.array([3, 1, 8, 5]), np.array([0.5, 2.0, 0.0, 1.0], "float32")
    model, alone = plain(), plain()
    with ft.selective_backprop(
        model, 0.25, lambda scores, k: (ops.convert_to_tensor(kept), ops.convert_to_tensor(weights))
    ):
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    alone.train_on_batch(x[kept], y[kept], sample_weight=weights)
    assert_same(model, alone, rtol=1e-6, atol=1e-8)


def test_importance_weights_fit_losses_with_more_axes():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 3, 4)).astype("float32"), rng.normal(size=(8, 3, 2)).astype("float32")
    kept, weights = np.array([5, 0]), np.array([3.0, 0.5], "float32")
    ends = []
    for selective in (True, False):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3, 4)), layers.Dense(2)])
        model.compile("sgd", "mse")
        if selective:
            rule = lambda scores, k: (ops.convert_to_tensor(kept), ops.convert_to_tensor(weights))  # noqa: E731
            with ft.selective_backprop(model, 0.25, rule):
                model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        else:
            model.train_on_batch(x[kept], y[kept], sample_weight=np.repeat(weights[:, None], 3, 1))
        ends.append(model.get_weights()[0])
    np.testing.assert_allclose(*ends, rtol=1e-6)


def test_sampling_by_percentile_remembers_losses_and_is_seeded():
    ends = []
    for seed in (1, 1, 2):
        model = plain()
        with ft.selective_backprop(model, 0.25, functools.partial(ft.batch.percentile, beta=2.0), seed=seed):
            model.fit(*data(), batch_size=16, shuffle=False, epochs=2, verbose=0)
        ends.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_array_equal(ends[0], ends[1])
    assert not np.allclose(ends[0], ends[2])


def test_other_scores_and_functions_of_ones_own():
    x, y = data(16)

    def farthest(scores, k, x, labels):
        return ft.batch.hardest(ops.where(ops.equal(labels, 1), ops.sum(x, -1), -100.0), k)

    expected = np.where(y == 1, x.sum(-1), -100.0)
    for options, order in (
        ({"rule": farthest}, expected),
        ({"score": lambda x: ops.sum(x, -1)}, x.sum(-1)),
        ({"score": ft.batch.Excess(lambda x: ops.sum(x, -1))}, losses(plain(), x, y) - x.sum(-1)),
    ):
        model, alone = plain(), plain()
        with ft.selective_backprop(model, 0.25, **options):
            model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
        kept = np.argsort(-order, kind="stable")[:4]
        alone.train_on_batch(x[kept], y[kept])
        assert_same(model, alone, rtol=1e-5, atol=1e-7)


def test_excess_over_a_reference_model():
    x, y = data(16)
    keras.utils.set_random_seed(9)
    reference = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    model, alone = plain(), plain()
    excess = losses(model, x, y) - losses(reference, x, y)
    with ft.selective_backprop(model, 0.25, score=ft.batch.Excess(reference)):
        logs = model.fit(x, y, batch_size=16, verbose=0, shuffle=False).history
    kept = np.argsort(-excess, kind="stable")[:4]
    np.testing.assert_allclose(logs["loss"], losses(plain(), x, y).mean(), rtol=1e-6)  # of the model, once
    alone.train_on_batch(x[kept], y[kept])
    assert_same(model, alone, rtol=1e-5, atol=1e-7)


def test_examples_whose_loss_is_not_finite_are_left_out_and_counted():
    x, y = data(16)
    x[[2, 7]] = np.nan
    model = plain()
    with ft.selective_backprop(model, 0.5):
        logs = model.fit(x, y, batch_size=16, verbose=0, epochs=2).history
    assert logs["nan_losses"] == [2.0, 2.0]
    assert all(np.isfinite(values).all() for values in state(model))


def test_keeping_everything_is_plain_fit_bit_for_bit():
    selective, reference = network(), network()
    with ft.selective_backprop(selective, 1.0):
        logs = selective.fit(*data(), batch_size=16, shuffle=False, verbose=0).history
    expected = reference.fit(*data(), batch_size=16, shuffle=False, verbose=0).history
    assert_same(selective, reference)
    assert logs == {**expected, "kept_fraction": [1.0], "kept_threshold": [0.0], "nan_losses": [0.0]}


@pytest.mark.parametrize("tune_first", [True, False])
def test_it_composes_with_tune(tune_first):
    x, y = data()
    model, reference = plain(), plain()
    part = ["hidden/kernel[:, :3]", "logits/*"]
    before = model.get_weights()
    with ft.tune(reference, ft.select(reference, *part)):
        reference.compile("adam", CROSSENTROPY())
        for start in (0, 16, 32):
            batch_x, batch_y = x[start : start + 16], y[start : start + 16]
            kept = np.argsort(-losses(reference, batch_x, batch_y), kind="stable")[:4]
            reference.train_on_batch(batch_x[kept], batch_y[kept])
    selection = ft.select(model, *part)
    if tune_first:
        tuning = ft.tune(model, selection)
        selective = ft.selective_backprop(model, 0.25)
    else:
        selective = ft.selective_backprop(model, 0.25)
        tuning = ft.tune(model, selection)
    model.compile("adam", CROSSENTROPY())
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert tuning.verify()
    tuning.finish()
    selective.stop()
    for one, other in zip(model.get_weights(), reference.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(model.get_weights()[0][:, 3:], before[0][:, 3:])
    assert np.abs(model.get_weights()[0][:, :3] - before[0][:, :3]).min() > 0


def test_a_model_is_as_before_when_it_has_stopped(tmp_path):
    model = network()
    model.fit(*data(), batch_size=16, verbose=0)
    before = set(vars(model))
    metrics, weights = list(model.metrics), len(model.weights)
    with pytest.raises(KeyboardInterrupt), ft.selective_backprop(model, 0.5):
        model.fit(*data(), batch_size=16, verbose=0)
        assert len(model.weights) == weights
        model.save(tmp_path / "model.keras")
        raise KeyboardInterrupt
    assert set(vars(model)) == before and len(model.metrics) == len(metrics)
    loaded = keras.saving.load_model(tmp_path / "model.keras")  # a plain model
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
    logs = model.fit(*data(), batch_size=16, verbose=0).history
    assert set(logs) == {"accuracy", "loss"}


def test_a_loss_and_a_model_of_ones_own():
    class Subclass(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):  # no training argument
            return self.dense(x)

    x, y = data(16)
    model, alone = Subclass(), Subclass()
    for each in (model, alone):
        each(x)
        each.compile("sgd", lambda y_true, y_pred: ops.sum((y_pred - ops.one_hot(y_true, 3)) ** 2, -1))
    alone.set_weights(model.get_weights())
    squares = ((ops.convert_to_numpy(model(x)) - np.eye(3)[y]) ** 2).sum(-1)
    kept = np.argsort(-squares, kind="stable")[:8]
    with ft.selective_backprop(model, 0.5):
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    alone.fit(x[kept], y[kept], batch_size=8, verbose=0, shuffle=False)
    for one, other in zip(model.get_weights(), alone.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("keep", [0, -0.5, 1.5, float("nan"), True, "half", None])
def test_a_share_outside_of_0_to_1_is_refused(keep):
    with pytest.raises(ft.BatchError, match="keep"):
        ft.selective_backprop(plain(), keep)


def test_bad_input_is_refused_and_changes_nothing():
    model = plain()
    x, y = data(16)
    before, start = set(vars(model)), model.get_weights()
    for options, text in (
        ({"rule": lambda scores: scores}, "how many to keep"),
        ({"rule": lambda scores, k, magic: scores}, "'magic'"),
        ({"rule": 3}, "function"),
        ({"score": lambda loss: loss}, "'loss'"),
        ({"when": 4}, "Schedule"),
        ({"tokens": layers.Dense(2)}, "a layer of the model"),
        ({"score": ft.batch.Stale("id", 4, 4), "tokens": True}, "examples"),
    ):
        with pytest.raises(ft.BatchError, match=text):
            ft.selective_backprop(model, 0.5, **options)
    with pytest.raises(ft.BatchError, match="Keras model"):
        ft.selective_backprop(layers.Dense(2), 0.5)
    assert set(vars(model)) == before
    with ft.selective_backprop(model, 0.5), pytest.raises(ft.BatchError, match="already"):
        ft.selective_backprop(model, 0.5)
    for options, call, text in (
        ({"score": ft.batch.Stale("id", 4, 4)}, lambda: model.fit(x, y, verbose=0), "'id'"),
        ({}, lambda: model.fit(x, verbose=0), "no targets"),
    ):
        with ft.selective_backprop(model, 0.5, **options), pytest.raises(ft.BatchError, match=text):
            call()
    model.compile("sgd", lambda y_true, y_pred: ops.mean(y_pred))
    with ft.selective_backprop(model, 0.5), pytest.raises(ft.BatchError, match="one number for a whole batch"):
        model.fit(x, y, verbose=0)
    for one, other in zip(model.get_weights(), start):
        np.testing.assert_array_equal(one, other)


def test_the_loss_of_an_epoch_counts_every_example_once():
    x, y = data(41)  # two batches of 16 and one of 9
    model, optimizer = plain(), keras.optimizers.SGD(0.0)
    model.compile(optimizer, CROSSENTROPY(), metrics=["accuracy"])
    expected = model.evaluate(x, y, return_dict=True, verbose=0)
    with ft.selective_backprop(model, 0.25):
        found = model.fit(x, y, batch_size=16, verbose=0, shuffle=False).history
    batches = [losses(model, x[i : i + 16], y[i : i + 16]).mean() for i in (0, 16, 32)]
    assert abs(np.mean(batches) - expected["loss"]) > 1e-3  # which is not the mean over the batches
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(found[name], [expected[name]], rtol=1e-6)


def test_the_loss_of_a_sequence_is_the_mean_over_its_tokens():
    """Padding has large losses here, and short sequences much of it: only by their masks are others the hardest."""
    rng = np.random.default_rng(4)
    lengths = np.array([6, 1, 5, 2, 6, 1, 4, 3])
    tokens = np.where(np.arange(6) < lengths[:, None], rng.integers(1, 9, (8, 6)), 0)
    y = np.where(tokens == 0, 50.0, rng.normal(size=(8, 6)))[..., None]

    def network():
        keras.utils.set_random_seed(1)
        embedding = layers.Embedding(9, 4, mask_zero=True)
        model = keras.Sequential([keras.Input((6,), dtype="int32"), embedding, layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    model, alone = network(), network()
    errors = (ops.convert_to_numpy(model(tokens)) - y)[..., 0] ** 2
    means = (errors * (tokens != 0)).sum(1) / lengths
    kept, wrong = (np.argsort(-scores, kind="stable")[:2] for scores in (means, errors.mean(1)))
    assert set(kept) != set(wrong)
    with ft.selective_backprop(model, 0.25):
        logs = model.fit(tokens, y, batch_size=8, verbose=0, shuffle=False).history
    np.testing.assert_allclose(logs["kept_threshold"], [means[kept[-1]]], rtol=1e-5)
    alone.train_on_batch(tokens[kept], y[kept])
    for one, other in zip(model.get_weights(), alone.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
