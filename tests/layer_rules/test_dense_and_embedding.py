"""Reading rules give what the composed read gives, which gives what plain Keras gives; only their cost differs."""

import keras
import numpy as np
import pytest
from helpers import cases, check_steps, mask_of, moved_outside, values
from hypothesis import given, settings
from hypothesis import strategies as st

import finetooth as ft
from finetooth.layer_rules import contraction, rule_for
from finetooth.parts.trainable import TrainablePart
from finetooth.regions.indexing import region_at

L = keras.layers


def dense(dtype="float32"):
    return (4,), lambda x: L.Dense(6, "tanh", name="layer", dtype=dtype)(x), "kernel"


def dense_over_time(dtype="float32"):
    return (3, 4), lambda x: L.Dense(6, "tanh", name="layer", dtype=dtype)(x), "kernel"


def projection(dtype="float32"):
    layer = L.EinsumDense("abc,cde->abde", (3, 2, 5), bias_axes="de", name="layer", dtype=dtype)
    return (3, 4), layer, "kernel"


def back_projection(dtype="float32"):
    layer = L.EinsumDense("...de,dec->...c", 6, bias_axes="c", name="layer", dtype=dtype)
    return (3, 2, 4), layer, "kernel"


def per_position(dtype="float32"):
    return (3, 4), L.EinsumDense("abc,bcd->abd", (3, 5), name="layer", dtype=dtype), "kernel"


def table(dtype="float32"):
    layer = L.Embedding(7, 4, name="layer", dtype=dtype)
    return (5,), lambda x: layer(keras.ops.cast(x * 7, "int32")), "embeddings"


KINDS = {f.__name__: f for f in (dense, dense_over_time, projection, back_projection, per_position, table)}


def model_of(kind, dtype="float32"):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    shape, layer, _ = KINDS[kind](dtype)
    inputs = keras.Input(shape)
    x = L.Flatten()(layer(inputs + 0.1))
    return keras.Model(inputs, L.Dense(2, name="head", dtype=dtype)(x))


def train(kind, index, dtype="float32", layer_rules=True, steps=2, **mode):
    model = model_of(kind, dtype)
    before = values(model)
    rng = np.random.default_rng(0)
    x, y = rng.uniform(0, 0.8, (6, *KINDS[kind](dtype)[0])), rng.normal(size=(6, 2))
    other = "layer/bias[0]" if kind == "dense" else "head/bias"
    part = ft.select(model, (f"layer/{KINDS[kind](dtype)[2]}", index), other)
    with ft.tune(model, part, layer_rules=layer_rules) as tuning:
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse", **mode)
        for _ in range(steps):
            model.train_on_batch(x, y)
        gradients = {row[0]: row[-1] for row in tuning.table().rows}
    after = values(model)
    assert moved_outside(before, after, tuning.selection) == {}
    return before, after, gradients


@st.composite
def grids(draw, shape, whole_rows):
    entries = []
    for axis, n in enumerate(shape):
        if whole_rows and axis:
            entries.append(slice(None))
        elif draw(st.booleans()):
            entries.append(sorted(draw(st.sets(st.integers(0, n - 1), min_size=1))))
        else:
            start = draw(st.integers(0, n - 1))
            entries.append(slice(start, draw(st.integers(start + 1, n)), draw(st.integers(1, 2))))
    return tuple(entries)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_rule_equals_the_composed_read_for_any_grid(kind, data):
    name = KINDS[kind]()[2]
    shape = tuple(values(model_of(kind))[f"layer/{name}"].shape)
    index = data.draw(grids(shape, whole_rows=kind == "table"))
    mode = {"run_eagerly": keras.backend.backend() == "tensorflow"}  # where most of the time would go to tracing
    before, by_rule, gradients = train(kind, index, **mode)
    _, composed, dense_gradients = train(kind, index, layer_rules=False, **mode)
    whole = region_at(shape, index).size == int(np.prod(shape))
    assert gradients[f"layer/{name}"] == ("own" if whole else "rows" if kind == "table" else "slice")
    assert dense_gradients[f"layer/{name}"] == ("own" if whole else "dense")
    for path in by_rule:
        np.testing.assert_allclose(by_rule[path], composed[path], rtol=1e-5, atol=1e-6, err_msg=path)
    moves = kind != "table" or bool(rows_read() & set(np.flatnonzero(mask_of(region_at(shape, index)).any(axis=1))))
    assert (by_rule[f"layer/{name}"] != before[f"layer/{name}"]).any() == moves


def rows_read():
    """The rows of the table that occur in the data of `train`."""
    x = np.random.default_rng(0).uniform(0, 0.8, (6, 5)).astype("float32")
    return set(((x + np.float32(0.1)) * np.float32(7)).astype(int).reshape(-1))


LOW = {"dense": "bfloat16", "projection": "mixed_bfloat16", "table": "float16"}


@pytest.mark.parametrize(("kind", "dtype"), cases(LOW, LOW.values(), quick=lambda kind, dtype: LOW[kind] == dtype))
def test_rules_in_low_precision(kind, dtype):
    index = np.s_[1:3]
    before, by_rule, gradients = train(kind, index, dtype)
    _, composed, _ = train(kind, index, dtype, layer_rules=False)
    check_steps(by_rule, composed, before, gradients, 0.05)


def test_unknown_layers_and_biases_are_composed():
    class MyDense(L.Dense):
        """May read its kernel in any way."""

    inputs = keras.Input((4,))
    model = keras.Model(inputs, MyDense(4, name="mine")(L.Dense(4, name="stock")(inputs)))
    with ft.tune(model, ft.select(model, "mine/kernel[0]", "stock/bias[1]")) as tuning:
        assert {row[-1] for row in tuning.table().rows} == {"dense"}


def test_attention_heads_are_read_by_rule():
    inputs = keras.Input((5, 8))
    layer = L.MultiHeadAttention(4, 2, name="attention")
    model = keras.Model(inputs, layer(inputs, inputs))
    with ft.tune(model, ft.heads(layer, [1, 3])) as tuning:
        gradients = {row[0]: row[-1] for row in tuning.table().rows}
    kernels = [path for path in gradients if path.endswith("kernel")]
    assert len(kernels) == 4 and {gradients[path] for path in kernels} == {"slice"}


def test_a_table_that_another_layer_reads_too_is_right_in_both():
    """The rule serves the look-up; the head reads the same variable, composed, and both gradients add up."""

    class Head(L.Layer):
        def __init__(self, table, **kwargs):
            super().__init__(**kwargs)
            self.table = table

        def call(self, x):
            return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))

    results = []
    for layer_rules in (None, True, False):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        words = keras.Input((4,), dtype="int32")
        embedding = L.Embedding(7, 3, name="table")
        model = keras.Model(words, Head(embedding, name="head")(embedding(words)))
        tuning = ft.tune(model, "**/embeddings[2:5]", layer_rules=layer_rules) if layer_rules is not None else None
        model.compile(keras.optimizers.SGD(1.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        tokens = np.array([[2, 2, 3, 0], [4, 6, 2, 1]])
        model.train_on_batch(tokens, np.roll(tokens, 1, axis=1))
        if tuning:
            tuning.finish()
            assert tuning.verify()
        results.append(model.get_layer("table").get_weights()[0][2:5])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-5, atol=1e-6)


def test_a_shared_layer_reads_its_part_twice():
    results = []
    for layer_rules in (True, False):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        layer = L.Dense(4, "tanh", name="twice")
        model = keras.Model(inputs, layer(layer(inputs)))
        with ft.tune(model, "twice/kernel[1:3]", layer_rules=layer_rules):
            model.compile(keras.optimizers.Adam(0.1), "mse")
            rng = np.random.default_rng(0)
            model.fit(rng.normal(size=(12, 4)), rng.normal(size=(12, 4)), batch_size=4, shuffle=False, verbose=0)
        results.append(values(model)["twice/kernel"])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_integer_inputs_are_promoted_as_keras_does():
    results = []
    for layer_rules in (True, False):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,), dtype="int32")
        model = keras.Model(inputs, L.Dense(3, name="d")(inputs))
        with ft.tune(model, "d/kernel[1:3]", layer_rules=layer_rules):
            model.compile("sgd", "mse")
            model.train_on_batch(np.arange(8).reshape(2, 4), np.ones((2, 3)))
        results.append(values(model)["d/kernel"])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)


def test_rules_only_serve_what_they_know():
    model = model_of("dense")
    layer = model.get_layer("layer")
    with ft.tune(model, "layer/*[0]") as tuning:
        kernel, bias = (tuning._parts[f"layer/{name}"] for name in ("kernel", "bias"))
        assert rule_for(layer, [bias, kernel]).parts == {kernel: "slice"}
        assert rule_for(layer, [bias]) is None
        assert rule_for(model.get_layer("head"), [kernel]) is None


@pytest.mark.parametrize(
    ("where", "length", "wide", "within"),
    [
        (range(0, 5), 20, range(0, 8), range(0, 5)),
        (range(3, 16), 40, range(3, 19), range(0, 13)),
        (range(17, 20), 20, range(12, 20), range(5, 8)),  # no room behind it
        (range(4, 12), 20, range(4, 12), None),  # round already
        (range(0, 5), 6, range(0, 5), None),  # no room at all
    ],
)
def test_ranges_are_widened_to_a_round_length(where, length, wide, within, monkeypatch):
    monkeypatch.setattr(contraction.backend, "alignment", lambda: 8)
    assert contraction._widened(where, length) == (wide, within)
    if within is not None:
        assert [*wide][within.start : within.stop] == [*where]


@pytest.mark.parametrize("index", [np.s_[3:6], np.s_[:, 17:20], np.s_[1:4, 2:7], np.s_[[0, 5, 6], 9:10]])
def test_a_widened_range_trains_what_is_selected(index, monkeypatch):
    """As on devices whose matrix units want slices of a round length."""
    results = []
    for layer_rules, alignment in ((True, 8), (True, 1), (False, 1)):
        monkeypatch.setattr(contraction.backend, "alignment", lambda alignment=alignment: alignment)
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((16,)), L.Dense(20, "tanh", name="d"), L.Dense(2, name="h")])
        before = values(model)
        with ft.tune(model, ft.select(model, ("d/kernel", index)), layer_rules=layer_rules) as tuning:
            model.compile("sgd", "mse")
            model.train_on_batch(np.linspace(-1, 1, 96).reshape(6, 16), np.ones((6, 2)))
        assert moved_outside(before, values(model), tuning.selection) == {}
        results.append(values(model)["d/kernel"])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(results[0], results[2], rtol=1e-5, atol=1e-6)


def kept_for_backward(model, x):
    """The sizes of the tensors that a training call keeps for its backward, largest first."""
    x = keras.ops.convert_to_tensor(x)
    if keras.backend.backend() == "torch":
        import torch

        sizes = []

        def pack(tensor):
            sizes.append(tensor.untyped_storage().nbytes() // tensor.itemsize)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x, training=True)
    else:
        import jax

        trained = [v.value for v in model.trainable_variables]
        frozen = [v.value for v in model.non_trainable_variables]
        _, pull_back = jax.vjp(lambda values: model.stateless_call(values, frozen, x, training=True)[0], trained)
        sizes = [leaf.size for leaf in jax.tree.leaves(pull_back)]
    return sorted(sizes, reverse=True)


if keras.backend.backend() != "tensorflow":  # whose compiler decides what is kept

    def test_no_more_of_the_input_is_kept_than_the_part_needs():
        x = np.random.default_rng(0).normal(size=(50, 16)).astype("float32")
        largest = {}
        for layer_rules in (True, False):
            keras.backend.clear_session(free_memory=False)
            model = keras.Sequential([keras.Input((16,)), L.Dense(8, name="d")])
            with ft.tune(model, "d/kernel[3:5]", layer_rules=layer_rules):
                largest[layer_rules] = kept_for_backward(model, x)[0]
        assert largest[True] <= 16 * 8  # at most the kernel; of the input, 50 x 2
        assert largest[False] >= 50 * 16  # all of the input


def penalty(layer_rules):
    """The gradient for the part of a gradient penalty: a second derivative of the model, in each backend's own way."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), L.Dense(5, "tanh", name="a"), L.Dense(2, name="h")])
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    with ft.tune(model, "a/kernel[:2]", layer_rules=layer_rules):
        (part,) = model.trainable_variables
        if keras.backend.backend() == "torch":
            import torch

            given = torch.tensor(x, requires_grad=True)
            (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
            (slope**2).sum().backward()
            return keras.ops.convert_to_numpy(part.value.grad)
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            given = tf.constant(x)
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(given)
                    total = tf.reduce_sum(model(given))
                loss = tf.reduce_sum(inner.gradient(total, given) ** 2)
            return outer.gradient(loss, part.value).numpy()
        import jax

        frozen = [v.value for v in model.non_trainable_variables]

        def squared_slope(value):
            slope = jax.grad(lambda given: model.stateless_call([value], frozen, given)[0].sum())(x)
            return (slope**2).sum()

        return np.asarray(jax.grad(squared_slope)(part.value))


def test_second_derivatives_are_right_or_refused():
    expected = penalty(False)
    assert np.abs(expected).max() > 0.1
    if keras.backend.backend() == "torch":
        with pytest.raises(ft.TuningError, match="layer_rules=False"):
            penalty(True)
    else:
        np.testing.assert_allclose(penalty(True), expected, rtol=1e-4, atol=1e-5)


if keras.backend.backend() == "torch":

    def test_a_fused_optimizer_of_torch_is_seen():
        """Its writes do not count as changes of a tensor, so nothing may rely on those being counted."""
        import torch

        results = []
        for layer_rules in (True, False):
            model = model_of("dense")
            x, y = torch.ones((6, 4)), torch.ones((6, 2))
            with ft.tune(model, "layer/kernel[[0, 2], 1:3]", layer_rules=layer_rules):
                optimizer = torch.optim.AdamW([v.value for v in model.trainable_variables], lr=0.1, fused=True)
                for _ in range(3):
                    optimizer.zero_grad()
                    ((model(x) - y) ** 2).mean().backward()
                    optimizer.step()
                inside = model.predict(x, verbose=0)
            np.testing.assert_allclose(model.predict(x, verbose=0), inside, rtol=1e-5, atol=1e-6)
            results.append(values(model)["layer/kernel"])
        np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_a_table_whose_rows_train_is_never_composed(monkeypatch):
    """Neither in a step nor when `fit` takes the values out of the variables and puts them back."""
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), keras.layers.Embedding(30, 3, name="table"), keras.layers.Dense(1)]
    )
    x, y = np.random.default_rng(0).integers(0, 30, (16, 4)), np.zeros((16, 4, 1))
    with ft.tune(model, "table/embeddings[:5]"):
        model.compile("adam", "mse")
        composed, merge = [], TrainablePart.merge
        with monkeypatch.context() as patch:
            patch.setattr(TrainablePart, "merge", lambda part, *args: composed.append(1) or merge(part, *args))
            model.fit(x, y, epochs=2, verbose=0)
            model.evaluate(x, y, verbose=0)
            assert not composed
            model.get_layer("table").embeddings.numpy()
            assert bool(composed) == (keras.backend.backend() == "jax")  # elsewhere the table holds the merged values
