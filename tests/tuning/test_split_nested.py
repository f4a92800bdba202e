"""The cut through nested models: as exact as in a flat one, of every form in which models are nested."""

import gc
import weakref

import keras
import numpy as np
import pytest
from halves import check_a_failing_split, data, trained
from helpers import moved_outside, values
from traces import graph_of, state_of

import finetooth as ft
from finetooth.keras_internals import private as keras_private

L = keras.layers


def backbone(name="backbone", width=6):
    """A residual model of two inputs with two outputs, the first of which is frozen if the block `high` is trained."""
    x, keep = keras.Input((width,), name="x"), keras.Input((width,), name="keep", dtype="bool")
    low = L.Dense(width, "tanh", name="low")(x)
    mid = L.Dense(width, "tanh", name="mid")(low)
    kept = L.Multiply(name="masked")([mid, keras.ops.cast(keep, "float32")])
    high = L.Dense(width, "tanh", name="high")(kept)
    total = L.Add(name="total")([high, low])
    return keras.Model({"x": x, "keep": keep}, {"a_low": mid, "b_high": total}, name=name)


def with_head():
    """A layer above takes the frozen output of the backbone, and the head what it makes."""
    x, keep = keras.Input((6,), name="x"), keras.Input((6,), name="keep", dtype="bool")
    made = backbone()({"x": x, "keep": keep})
    side = L.Dense(6, "tanh", name="side")(made["a_low"])
    return keras.Model({"x": x, "keep": keep}, L.Dense(3, name="out")(L.Add(name="both")([side, made["b_high"]])))


def deep():
    """Models of all kinds, three deep."""
    inner = keras.Sequential([keras.Input((6,)), L.Dense(6, "tanh", name="p"), L.Dense(6, name="q")], name="inner")
    inputs = keras.Input((6,))
    x = inner(L.Dense(6, "tanh", name="o")(inputs))
    middle = keras.Model(inputs, L.Dense(6, "tanh", name="r")(x), name="middle")
    return keras.Sequential([keras.Input((6,)), L.Dense(6, "tanh", name="first"), middle, L.Dense(3, name="out")])


def same_names():
    """Two nested models whose layers have the same names, beside a layer outside that has, too."""
    inputs = keras.Input((6,))

    def part(name):
        own = keras.Input((6,), name="own")
        return keras.Model(own, L.Dense(6, "tanh", name="b")(L.Dense(6, "tanh", name="a")(own)), name=name)

    x = L.Add()([part("left")(inputs), part("right")(L.Dense(6, "tanh", name="a")(inputs))])
    return keras.Model(inputs, L.Dense(3, name="out")(x))


def twins():
    """One nested model is called twice on what is frozen."""
    inputs = keras.Input((6,))
    tower = keras.Sequential([keras.Input((6,)), L.Dense(6, "tanh", name="a"), L.Dense(6, name="b")], name="tower")
    x = L.Subtract(name="difference")([tower(inputs), tower(L.Dense(6, "tanh", name="other")(inputs))])
    return keras.Model(inputs, L.Dense(3, name="out")(x))


def stacked():
    """One nested model is called on what it has made."""
    inputs = keras.Input((6,))
    tower = keras.Sequential([keras.Input((6,)), L.Dense(6, "tanh", name="a"), L.Dense(6, name="b")], name="tower")
    return keras.Model(inputs, L.Dense(3, name="out")(tower(tower(L.Dense(6, name="first")(inputs)))))


def borrowed():
    """A layer inside of the nested model is called outside again, as the table of a language model is."""
    inputs = keras.Input((6,))
    shared = L.Dense(6, "tanh", name="shared")
    inner = keras.Sequential([keras.Input((6,)), shared, L.Dense(6, name="b")], name="inner")
    return keras.Model(inputs, L.Dense(3, name="out")(shared(inner(inputs))))


def at_inference():
    """As transfer learning is written: the nested model is called with training=False."""
    layers = [L.Dense(6, name="a"), L.BatchNormalization(name="norm"), L.Dense(6, name="b"), L.Dropout(0.5)]
    base = keras.Sequential([keras.Input((6,)), *layers], name="base")
    inputs = keras.Input((6,))
    return keras.Model(inputs, L.Dense(3, name="out")(base(inputs, training=False)))


class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.a, self.b = L.Dense(6, "tanh", name="a"), L.Dense(6, name="b")

    def call(self, x):
        return self.b(self.a(x))


def opaque():
    inputs = keras.Input((6,))
    return keras.Model(inputs, L.Dense(3, name="out")(Subclassed(name="own")(L.Dense(6, name="first")(inputs))))


X, KEEP, Y = *data((6,), n=20), np.random.default_rng(1).random((20, 6)) < 0.7, data((3,), n=20, seed=2)[0]
EXACT = 0 if keras.backend.backend() == "torch" else 1e-6  # `predict` is compiled elsewhere, and operations are fused
MODELS = {
    # name: how it is made, what is selected, which layers make the tensors at the cut
    "two outputs": (with_head, ["backbone/high/kernel[:, :3]"], ["side", "backbone/masked", "backbone/low"]),
    "input in the middle": (with_head, ["backbone/mid/bias[2:]"], ["backbone/low", "backbone/cast"]),
    "three deep": (deep, ["middle/inner/q/kernel[1:3]"], ["middle/inner/p"]),
    "the middle one": (deep, ["middle/r/kernel[1:3]"], ["middle/inner"]),
    "same names": (same_names, ["left/b/*", "right/b/*[:2]"], ["left/a", "right/a"]),
    "called twice": (twins, ["tower/b/kernel[:, ::2]"], ["tower/a", "tower/a"]),
    "called on itself": (stacked, ["tower/b/kernel[:, ::2]"], ["first"]),
    "a layer lent": (borrowed, ["inner/b/*"], ["inner/shared"]),
    "at inference": (at_inference, ["base/b/kernel[:, :2]"], ["base/norm"]),
    "a call of its own": (opaque, ["own/b/*"], ["first"]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_training_above_a_cut_through_nested_models_is_training_the_model(kind):
    make, selection, makers = MODELS[kind]
    x = {"x": X, "keep": KEEP} if make is with_head else X
    plain, plain_history, _ = trained(make, selection, x, Y, by_halves=False, run_eagerly=True)
    model, history, split = trained(make, selection, x, Y, by_halves=True, run_eagerly=True)
    a, b = values(plain), values(model)
    np.testing.assert_allclose(history["loss"], plain_history["loss"], rtol=EXACT)
    for path in a:
        np.testing.assert_allclose(b[path], a[path], rtol=EXACT, atol=EXACT, err_msg=path)
    assert [row[0] for row in split.table().rows] == makers


@pytest.mark.parametrize("kind", ["two outputs", "three deep", "called twice"])
def test_no_trace_is_left_in_nested_models(kind):
    make, selection, _ = MODELS[kind]
    x = {"x": X, "keep": KEEP} if make is with_head else X
    model = make()
    before, graph, start = state_of(model), graph_of(model), values(model)
    with ft.tune(model, *selection) as tuning:
        split = tuning.split()
        features = split.features(x, verbose=0)
        inner = {half for side in (split.lower, split.upper) for half in keras_private.layers_of(side)}
        made = [weakref.ref(half) for half in inner.difference(keras_private.layers_of(model))]
        whole, halved = keras.ops.convert_to_numpy(model(x)), split.upper.predict(features, verbose=0)
        np.testing.assert_allclose(halved, whole, rtol=1e-5, atol=1e-6)
    assert state_of(model) == before and graph_of(model) == graph
    assert moved_outside(start, values(model), tuning.selection) == {}
    del split, tuning, inner
    gc.collect()
    assert len(made) >= 4 and not any(half() for half in made)


def test_a_split_of_nested_models_that_fails_leaves_no_trace(monkeypatch):
    check_a_failing_split(deep(), "middle/inner/q/*", X, (20, 6), monkeypatch)


class Doubling(L.Layer):
    def call(self, x, training=False):
        return 2 * x if training else x


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (lambda: L.Dropout(0.5, name="odd"), "'odd' draws random numbers"),
        (lambda: Doubling(name="odd"), "'odd' computes in training something else"),
        (lambda: L.Dense(6, activity_regularizer="l2", name="odd"), "'odd' adds to the loss"),
        (lambda: L.Lambda(lambda x: x - keras.ops.mean(x, 0, keepdims=True), name="odd"), "'odd' mixes the examples"),
    ],
)
def test_what_cannot_be_kept_inside_of_a_nested_model_is_named(odd, said):
    inner = keras.Sequential([keras.Input((6,)), L.Dense(6, name="a"), odd(), L.Dense(6, name="b")], name="inner")
    inputs = keras.Input((6,))
    model = keras.Model(inputs, L.Dense(3, name="out")(inner(inputs)))
    graph = graph_of(model)
    with ft.tune(model, "inner/b/*") as tuning:
        with pytest.raises(ft.TuningError, match=said):
            tuning.split().features(X, verbose=0)
    assert graph_of(model) == graph


def test_a_mask_inside_of_a_nested_model_cannot_cross():
    inner = keras.Sequential([keras.Input((4,), dtype="int32"), L.Embedding(9, 3, mask_zero=True), L.GRU(3, name="b")])
    inputs = keras.Input((4,), dtype="int32")
    model = keras.Model(inputs, L.Dense(3, name="out")(inner(inputs)))
    with ft.tune(model, model.layers[1].get_layer("b")) as tuning:
        with pytest.raises(ft.TuningError, match="embedding' makes carries a Keras mask"):
            tuning.split().features(np.ones((6, 4), "int32"), verbose=0)


def test_a_layer_with_something_to_train_first_of_all_is_an_error():
    model = deep()
    for selection in ("first/*", "first/bias[0]"):
        with ft.tune(model, selection) as tuning, pytest.raises(ft.TuningError, match="no frozen prefix: 'first'"):
            tuning.split()
    inputs = keras.Input((6,))
    model = keras.Model(inputs, L.Dense(3, name="out")(Subclassed(name="own")(inputs)))
    with ft.tune(model, "own/b/*") as tuning:
        with pytest.raises(ft.TuningError, match="no frozen prefix: 'own'.*cannot be split"):
            tuning.split()


def test_what_is_printed_names_the_layers_inside():
    with ft.tune(deep(), "middle/inner/q/*") as tuning:
        text = " ".join(str(tuning.split()).split())
        assert "once: first, middle/o, middle/inner/p" in text and "trained: middle/inner/q, middle/r, out" in text


def hub_tasks():
    import keras_hub

    causal = {"vocabulary_size": 11, "num_layers": 2, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 12}
    lengths = {"max_sequence_length": 8}
    llama = keras_hub.models.LlamaBackbone(11, 2, 2, 8, 12, 1)
    return {
        "gpt 2": keras_hub.models.GPT2CausalLM(keras_hub.models.GPT2Backbone(**causal, **lengths, dropout=0.0), None),
        "llama": keras_hub.models.LlamaCausalLM(llama, None),
        "bert": keras_hub.models.BertTextClassifier(
            keras_hub.models.BertBackbone(**causal, **lengths, dropout=0.0), 3, preprocessor=None, dropout=0.0
        ),
    }


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt 2", "llama", "bert"])
def test_tasks_of_keras_hub_are_cut_inside_their_backbone(name):
    rng = np.random.default_rng(0)
    x = {"token_ids": rng.integers(1, 11, (12, 8)), "padding_mask": np.ones((12, 8), "int32")}
    x |= {"segment_ids": np.zeros((12, 8), "int32")} if name == "bert" else {}
    y = rng.integers(0, 3, 12) if name == "bert" else rng.integers(1, 11, (12, 8))
    results = []
    for by_halves in (False, True):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = hub_tasks()[name]
        last = next(p for p in reversed(ft.select(model, "**/transformer_layer_1/**").weights) if "layer_1" in p)
        with ft.tune(model, last) as tuning:
            split = tuning.split()
            trainee = split.upper if by_halves else model
            inputs = split.features(x, verbose=0) if by_halves else x
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            trainee.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=keras.backend.backend() != "jax")
            history = trainee.fit(inputs, y, batch_size=6, epochs=2, shuffle=False, verbose=0).history["loss"]
        assert tuning.verify() and any("_backbone/" in row[0] for row in split.table().rows)
        results.append((history, values(model)[last]))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-5)
    np.testing.assert_allclose(results[1][1], results[0][1], rtol=1e-5, atol=1e-6)
