"""Choosing tokens: the gradient of the kept ones alone, masks and weights, and nothing computed for the rest."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, ops

import finetooth as ft

WORDS, LENGTH, BATCH = 11, 6, 8
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy


def text(count=BATCH, padding=False):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, WORDS, (count, LENGTH))
    if padding:
        tokens[np.arange(LENGTH)[None] >= rng.integers(1, LENGTH + 1, count)[:, None]] = 0
    return tokens, rng.integers(0, WORDS, (count, LENGTH))


def language_model(softmax=False, mask=False, optimizer="sgd", **head):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 8, mask_zero=mask, name="embedding")(inputs)
    x = layers.LSTM(8, return_sequences=True, name="body", kernel_regularizer="l2")(x)
    x = layers.LayerNormalization()(x)
    x = layers.Dense(WORDS, name="head", **head)(x)
    model = keras.Model(inputs, layers.Softmax()(x) if softmax else x)
    from_logits = not softmax and "activation" not in head
    model.compile(optimizer, CROSSENTROPY(from_logits=from_logits), weighted_metrics=["accuracy"])
    return model


def token_losses(model, x, y, from_logits=True):
    return ops.convert_to_numpy(CROSSENTROPY(from_logits=from_logits, reduction="none")(y, plain(model(x))))


def plain(tensor):
    """Without Keras' mask, which a loss would apply by itself."""
    return ops.convert_to_tensor(ops.convert_to_numpy(tensor))


def step_by_weights(model, x, y, weights):
    """A plain step on a weighted sum of the losses of all tokens, which Keras divides by their number."""
    model.compile(model.optimizer, model.loss)
    model.train_on_batch(x, y, sample_weight=weights * weights.size)


def assert_close(model, reference):
    for one, other in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "head",
    [{}, {"use_bias": False}, {"softmax": True}, {"activation": "softmax"}, {"kernel_constraint": "max_norm"}],
    ids=str,
)
def test_the_step_is_that_of_the_kept_tokens(head):
    x, y = text()
    model, reference = language_model(**head), language_model(**head)
    losses = token_losses(model, x, y, model.loss.from_logits).ravel()
    kept = np.argsort(-losses, kind="stable")[:12]
    weights = np.zeros(x.size, "float32")
    weights[kept] = 1 / 12
    step_by_weights(reference, x, y, weights.reshape(x.shape))
    with ft.selective_backprop(model, 0.25, tokens=True):
        logs = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history
    assert_close(model, reference)
    expected = language_model(**head).evaluate(x, y, batch_size=BATCH, return_dict=True, verbose=0)
    for name, value in expected.items():  # of all tokens, the regularizer's loss included
        np.testing.assert_allclose(logs[name], [value], rtol=1e-5)
    np.testing.assert_allclose(logs["kept_threshold"], np.sort(losses)[-12], rtol=1e-5)


@pytest.mark.parametrize("by", ["mask", "weights", "both"])
def test_padding_is_never_kept_and_never_counted(by):
    """With half of the tokens wanted, fewer are valid: all of those train, each once."""
    x, y = text(padding=True)
    valid = (x != 0).astype("float32")
    own = valid if by != "mask" else None
    if by == "both":
        own = valid * np.random.default_rng(1).random(x.shape).astype("float32")
    assert valid.sum() < 40
    model, reference = language_model(mask=by != "weights"), language_model(mask=False)
    if by != "weights":  # the mask also changes the LSTM
        reference = language_model(mask=True)
    weights = valid / valid.sum() * (1 if by != "both" else own)
    with keras_mask_ignored(reference):
        step_by_weights(reference, x, y, weights)
    with ft.selective_backprop(model, 40 / 48, tokens=True):
        logs = model.fit(x, y, sample_weight=own, batch_size=BATCH, shuffle=False, verbose=0).history
    assert_close(model, reference)
    assert logs["nan_losses"] == [0.0]


class keras_mask_ignored:
    """The reference's weights are exact; Keras would rescale them by the mask."""

    def __init__(self, model):
        self.layer = model.get_layer("head")

    def __enter__(self):
        self.layer.compute_mask = lambda *args, **kwargs: None

    def __exit__(self, *error):
        del self.layer.compute_mask


def test_excess_over_a_reference_model_decides():
    x, y = text()
    keras.utils.set_random_seed(8)
    knowing = language_model()
    knowing.set_weights([w + 0.5 * np.random.default_rng(2).normal(size=w.shape) for w in knowing.get_weights()])
    model, reference = language_model(), language_model()
    excess = (token_losses(model, x, y) - token_losses(knowing, x, y)).ravel()
    kept = np.argsort(-excess, kind="stable")[:12]
    assert set(kept) != set(np.argsort(-token_losses(model, x, y).ravel(), kind="stable")[:12])
    weights = np.zeros(x.size, "float32")
    weights[kept] = 1 / 12
    step_by_weights(reference, x, y, weights.reshape(x.shape))
    with ft.selective_backprop(model, 0.25, score=ft.batch.Excess(knowing), tokens=True):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_close(model, reference)


def test_the_head_is_given_kept_tokens_only():
    shapes = []

    class Head(layers.Dense):
        def call(self, inputs, training=False):
            if training:
                shapes.append(tuple(inputs.shape))
            return super().call(inputs)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = layers.Embedding(WORDS, 8), Head(WORDS)
            self.body = layers.GRU(8, return_sequences=True)

        def call(self, x, training=False):
            return self.head(self.body(self.embedding(x)), training=training)

    model = Model()
    x, y = text()
    model(x)
    model.compile("sgd", CROSSENTROPY(from_logits=True))
    with ft.selective_backprop(model, 0.25, tokens=model.head):
        model.fit(x, y, batch_size=BATCH, verbose=0)
    assert shapes == [(BATCH, LENGTH, 8), (1, 12, 8)]


def test_a_head_in_mixed_precision_has_gradients_for_its_own_weights():
    x, y = text()
    model, reference = (language_model(dtype="mixed_bfloat16") for _ in range(2))
    before = [np.array(w) for w in model.get_weights()]
    reference.train_on_batch(x, y)
    with ft.selective_backprop(model, 0.999, tokens=True):  # all tokens, by the way of those kept
        model.train_on_batch(x, y)
    for start, own, expected in zip(before, model.get_weights(), reference.get_weights(), strict=True):
        assert own.dtype == np.float32 and (own != start).any()
        np.testing.assert_allclose(own - start, expected - start, rtol=0.05, atol=0.01 * np.abs(expected - start).max())


def test_logits_of_a_plain_head_are_computed_once(monkeypatch):
    shapes = []
    call = layers.Dense.call

    def noting(self, inputs, training=None):
        shapes.append(tuple(inputs.shape))
        return call(self, inputs, training)

    model = language_model()
    model.train_on_batch(*text())
    monkeypatch.setattr(layers.Dense, "call", noting)
    with ft.selective_backprop(model, 0.25, tokens=True):
        model.train_on_batch(*text())
    assert shapes == [(BATCH, LENGTH, 8)]


def test_sampling_keeps_its_history_and_its_seeds():
    ends = []
    rule = functools.partial(ft.batch.percentile, importance=True)
    for seed in (1, 1, 2):
        model = language_model(optimizer=keras.optimizers.Adam(1e-2))
        with ft.selective_backprop(model, 0.25, rule, tokens=True, seed=seed):
            model.fit(*text(24), batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
        ends.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_array_equal(ends[0], ends[1])
    assert not np.allclose(ends[0], ends[2])


def test_a_schedule_smaller_batches_and_a_part():
    model = language_model(optimizer=keras.optimizers.Adam(1e-2))
    before = model.get_layer("head").get_weights()
    with ft.tune(model, ft.select(model, "head/kernel[:, :5]", "body/**")) as tuning:
        model.compile(keras.optimizers.AdamW(1e-2), model.loss)
        with ft.selective_backprop(model, 0.25, tokens=True, when=ft.Schedule(start=1)):
            logs = model.fit(*text(20), batch_size=BATCH, verbose=0, epochs=2).history
        assert tuning.verify()
    np.testing.assert_allclose(logs["kept_fraction"][1], 0.25)
    after = model.get_layer("head").get_weights()
    np.testing.assert_array_equal(after[0][:, 5:], before[0][:, 5:])
    assert (after[0][:, :5] != before[0][:, :5]).all()


def test_models_whose_head_is_not_known_are_refused():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH,))
    lstm = keras.Model(inputs, layers.LSTM(3, return_sequences=True)(layers.Reshape((LENGTH, 1))(inputs)))
    with pytest.raises(ft.BatchError, match="does not end in Dense"):
        ft.selective_backprop(lstm, 0.5, tokens=True)
    classifier = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    classifier.compile("sgd", CROSSENTROPY(from_logits=True))
    start = classifier.get_weights()
    with ft.selective_backprop(classifier, 0.5, tokens=True), pytest.raises(ft.BatchError, match="axis of tokens"):
        classifier.fit(np.zeros((4, 6)), np.zeros(4), verbose=0)
    np.testing.assert_array_equal(classifier.get_weights()[0], start[0])
    model = language_model()
    with (
        ft.selective_backprop(model, 0.5, tokens=model.get_layer("embedding")),
        pytest.raises(ft.BatchError, match="Tokens cannot be kept at 'embedding'"),
    ):
        model.fit(*text(), verbose=0)


def test_what_is_remembered_is_counted_exactly_in_mixed_precision():
    """Read in bfloat16, a sum would stand still long before the epoch ends."""
    model = language_model(dtype="mixed_bfloat16", optimizer=keras.optimizers.SGD(0.0))
    x, y = text(BATCH * 40)
    with ft.selective_backprop(model, 13 / (BATCH * LENGTH), tokens=True):
        logs = model.fit(x, y, batch_size=BATCH, verbose=0).history
    np.testing.assert_allclose(logs["kept_fraction"], [13 / (BATCH * LENGTH)], rtol=1e-6)
