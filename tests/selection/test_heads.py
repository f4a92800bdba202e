"""`heads` of attention layers of any class: what a head adds to the output is in its selected weights, and no more."""

import keras
import numpy as np
import pytest
from helpers import values

import finetooth as ft
from finetooth.keras_internals import private as keras_private
from finetooth.keras_internals.weights import weights_by_path
from finetooth.regions.indexing import region_at

L = keras.layers
QUERIES, SIZE, WIDTH, LENGTH = 4, 3, 8, 5


class Attention(L.Layer):
    """Attention as many packages write it. `forms` are the equations of the projections, or "dense" for a Dense."""

    def __init__(self, names, shared=QUERIES, output="bqnh,nhm->bqm", into="bqm,mnh->bqnh", size=SIZE, **kwargs):
        super().__init__(name="attention", **kwargs)
        self.num_query_heads, self.num_key_value_heads, self.size = QUERIES, shared, size
        self.names, self.into, self.output_equation = names, into, output

    def build(self, shape):
        query, key, value, output = self.names
        for name, count in ((query, QUERIES), (key, self.num_key_value_heads), (value, self.num_key_value_heads)):
            axes = "nh" if self.into.endswith("nh") else "hn"
            out = (None, count, self.size) if axes == "nh" else (None, self.size, count)
            layer = L.EinsumDense(self.into, out, bias_axes=axes, name=name, bias_initializer="normal")
            setattr(self, f"_{name}", layer)
            layer.build(shape)
        if self.output_equation:
            self._out = L.EinsumDense(self.output_equation, (None, WIDTH), bias_axes="m", name=output)
            self._out.build((None, LENGTH, QUERIES, self.size))
        else:
            self._out = L.Dense(WIDTH, name=output)
            self._out.build((None, LENGTH, QUERIES * self.size))

    def call(self, x):
        query, key, value = (getattr(self, f"_{name}")(x) for name in self.names[:3])
        if self.into.endswith("hn"):
            query, key, value = (keras.ops.swapaxes(each, -1, -2) for each in (query, key, value))
        key, value = (keras.ops.repeat(each, QUERIES // self.num_key_value_heads, axis=2) for each in (key, value))
        weights = keras.ops.softmax(keras.ops.einsum("bqnh,bknh->bnqk", query, key))
        mixed = keras.ops.einsum("bnqk,bknh->bqnh", weights, value)
        return self._out(mixed if self.output_equation else keras.ops.reshape(mixed, (-1, LENGTH, QUERIES * self.size)))


def contributions(weights, into, shared):
    """What each head adds to the output, in float64 and NumPy."""

    def projected(name, count):
        layout = "nh" if into.endswith("nh") else "hn"
        kernel, bias = (weights[f"{name}/{kind}"].astype(float) for kind in ("kernel", "bias"))
        y = np.einsum(f"{into.split('->')[0]}->bq{layout}", X.astype(float), kernel) + bias
        y = y if layout == "nh" else np.swapaxes(y, -1, -2)
        return np.repeat(y, QUERIES // count, axis=2)

    names = list(dict.fromkeys(path.split("/")[0] for path in weights))
    q, k, v = projected(names[0], QUERIES), projected(names[1], shared), projected(names[2], shared)
    scores = np.exp(np.einsum("bqnh,bknh->bnqk", q, k))
    mixed = np.einsum("bnqk,bknh->bqnh", scores / scores.sum(-1, keepdims=True), v)
    output = weights[f"{names[3]}/kernel"].astype(float).reshape(QUERIES, -1, WIDTH)
    return np.einsum("bqnh,nhm->nbqm", mixed, output)


X = np.random.default_rng(0).normal(size=(2, LENGTH, WIDTH)).astype("float32")
FORMS = {
    "plain names": (("query", "key", "value", "attention_output"), {}),
    "heads first": (("query", "key", "value", "output_dense"), {"into": "bqm,nmh->bqnh"}),
    "heads last": (("query", "key", "value", "output"), {"into": "bqm,mhn->bqhn"}),
    "short names": (("q_proj", "k_proj", "v_proj", "o_proj"), {}),
    "shared keys": (("query_dense", "key_dense", "value_dense", "output_dense"), {"shared": 2}),
    "one shared key": (("wq", "wk", "wv", "wo"), {"shared": 1}),
    "flat output": (("query", "key", "value", "output_dense"), {"output": None, "shared": 2}),
    "flat einsum": (("query", "key", "value", "out"), {"output": None}),
    "size of heads": (("query", "key", "value", "output"), {"shared": 2, "size": QUERIES}),
}


@pytest.mark.parametrize("form", FORMS)
def test_without_its_weights_a_head_adds_nothing_and_all_others_what_they_did(form):
    names, options = FORMS[form]
    inputs = keras.Input((LENGTH, WIDTH))
    model = keras.Model(inputs, Attention(names, **options)(inputs))
    by_name = {path.removeprefix("attention/"): value for path, value in values(model).items()}
    each = contributions(by_name, options.get("into", "bqm,mnh->bqnh"), options.get("shared", QUERIES))
    before = keras.ops.convert_to_numpy(model(X))
    np.testing.assert_allclose(before, each.sum(0) + by_name[f"{names[3]}/bias"], rtol=1e-4, atol=1e-5)
    for chosen in ([2], [0, 1]):
        part = ft.select(model, ft.heads(model.layers[-1], chosen))
        kept = values(model)
        with ft.tune(model, part):
            for variable in model.trainable_variables:
                variable.assign(np.zeros(variable.shape))
        without = keras.ops.convert_to_numpy(model(X))
        np.testing.assert_allclose(without, before - each[chosen].sum(0), rtol=1e-4, atol=1e-5)
        changed = values(model)
        model.set_weights([*kept.values()])
        group = QUERIES // options.get("shared", QUERIES)
        # Keys and values of a group are selected with all of its heads, and then in whole.
        expected = {"query", "output"} | ({"key", "value"} if len(chosen) % group == 0 else set())
        roles = {name: role for name, role in zip(names, ("query", "key", "value", "output"))}
        assert {roles[path.split("/")[1]] for path in part} == expected
        for path in part:
            assert part[path].size * QUERIES == kept[path].size * len(chosen)
            assert (changed[path][part[path].mask()] == 0).all()


class Fused(L.Layer):
    def __init__(self, rows):
        super().__init__(name="attention")
        self._num_heads = 4
        self.qkv = L.EinsumDense("abc,cde->abde", (None, 4, 9), bias_axes="de", name="query_key_value")
        self.out = L.EinsumDense("abc,cd->abd", (None, WIDTH), name="attention_output")
        self.rows = rows
        self.norm = L.LayerNormalization(name="query_norm")

    def build(self, shape):
        self.qkv.build(shape)
        self.norm.build((None, 4, 3))
        self.out.build((None, LENGTH, self.rows))


def test_a_fused_projection_with_an_axis_of_heads_is_taken_by_heads():
    layer, other = Fused(rows=12), Fused(rows=24)
    for each in (layer, other):
        each.build((None, LENGTH, WIDTH))
    assert dict(ft.heads(layer, [1, 3]).items()) == {
        "attention/query_key_value/kernel": region_at((WIDTH, 4, 9), np.s_[:, 1::2]),
        "attention/query_key_value/bias": region_at((4, 9), np.s_[1::2]),
        "attention/attention_output/kernel": region_at((12, WIDTH), np.s_[[3, 4, 5, 9, 10, 11]]),
    }
    with pytest.raises(ft.SelectionError, match="do not tell the 4 heads of 'attention', a Fused"):
        ft.heads(other, 1)  # six rows for each head, of three entries


class Flat(L.Layer):
    """Projections to (heads * entries) or (entries * heads): shapes do not tell."""

    def __init__(self, name="attention"):
        super().__init__(name=name)
        self.num_heads = 4
        self.query, self.key, self.out = (L.Dense(12, name=name) for name in ("query", "key", "output"))

    def build(self, shape):
        for layer in (self.query, self.key, self.out):
            layer.build((None, 12))


def test_what_names_and_shapes_do_not_tell_is_an_error_that_lists_the_weights():
    flat = Flat()
    flat.build((None, LENGTH, 12))
    with pytest.raises(ft.SelectionError, match=r"4 heads of 'attention', a Flat.*\n  .*/query/kernel \(12, 12\)\n"):
        ft.heads(flat, 0)
    unclear = Attention(("query", "key", "value", "output"), size=QUERIES)
    unclear.build((None, LENGTH, WIDTH))
    with pytest.raises(ft.SelectionError, match=r"query/kernel \(8, 4, 4\)\n.*(\n.*)*np.s_"):
        ft.heads(unclear, 0)
    unnamed = Attention(("first", "second", "third", "fourth"))
    unnamed.build((None, LENGTH, WIDTH))
    with pytest.raises(ft.SelectionError, match=r"fourth/kernel \(4, 3, 8\)"):
        ft.heads(unnamed, 0)
    uneven = Attention(("query", "key", "value", "output"), shared=3)
    with pytest.raises(ft.SelectionError, match="4 query heads for 3 key/value heads"):
        ft.heads(uneven, 0)


def test_a_block_around_attention_names_the_layer_that_has_heads():
    inputs = keras.Input((LENGTH, 12))
    block = keras.Sequential([inputs, Flat("deep")])
    with pytest.raises(
        ft.SelectionError, match=r"received Sequential. Layers inside of it that have heads: \['deep'\]"
    ):
        ft.heads(block, 0)


def test_a_gate_per_head_finds_the_rows_of_a_flat_output():
    names, options = FORMS["flat output"]
    inputs = keras.Input((LENGTH, WIDTH))
    opened = keras.Variable([True, False, False, True], dtype="bool", trainable=False)
    model = keras.Model(inputs, ft.Gate(Attention(names, **options), when=opened, per_head=True)(inputs))
    model.compile(keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
    before = values(model)
    model.fit(X, np.zeros_like(X), verbose=0)
    kernel = next(path for path in before if "output_dense/kernel" in path)
    moved = (values(model)[kernel] != before[kernel]).reshape(QUERIES, SIZE, WIDTH).any((1, 2))
    assert moved.tolist() == [True, False, False, True]


def hub_layers():
    """KerasHub's own attention layers."""
    from keras_hub.src.models.bloom.bloom_attention import BloomAttention
    from keras_hub.src.models.falcon.falcon_attention import FalconAttention
    from keras_hub.src.models.gemma.gemma_attention import CachedGemmaAttention
    from keras_hub.src.models.gemma3.gemma3_attention import CachedGemma3Attention
    from keras_hub.src.models.gpt_neo_x.gpt_neo_x_attention import GPTNeoXAttention
    from keras_hub.src.models.gpt_oss.gpt_oss_attention import GptOssAttention
    from keras_hub.src.models.llama.llama_attention import LlamaAttention
    from keras_hub.src.models.mistral.mistral_attention import CachedMistralAttention
    from keras_hub.src.models.phi3.phi3_attention import Phi3Attention
    from keras_hub.src.models.qwen.qwen_attention import QwenAttention
    from keras_hub.src.models.qwen3.qwen3_attention import Qwen3Attention
    from keras_hub.src.models.qwen_moe.qwen_moe_attention import QwenMoeAttention

    both = {"num_query_heads": 4, "num_key_value_heads": 2}
    return [
        CachedGemmaAttention(head_dim=6, **both),
        CachedGemma3Attention(head_dim=6, **both),
        LlamaAttention(**both),
        CachedMistralAttention(**both),
        Phi3Attention(**both),
        QwenAttention(**both),
        Qwen3Attention(**both, head_dim=6),
        QwenMoeAttention(**both),
        GptOssAttention(**both, head_dim=6),
        GPTNeoXAttention(4, 32),
        FalconAttention(4, 0.0),
        BloomAttention(4),
    ]


@pytest.mark.long
def test_heads_of_keras_hub_add_what_their_weights_make():
    """The output projection is linear: what a head adds to it is known from what enters it."""
    x = np.random.default_rng(0).normal(size=(2, LENGTH, 32)).astype("float32")
    mask = np.ones((2, LENGTH, LENGTH), "int32")
    for layer in hub_layers():
        kind = type(layer).__name__
        options = {"attention_mask": mask}
        if kind == "FalconAttention":
            options["alibi"] = np.zeros((2, 4, 1, LENGTH), "float32")
        layer.build((None, LENGTH, 32))
        output = next(inner for inner in keras_private.inner_layers(layer) if "output" in inner.name)
        entered, original = [], output.call
        output.call = lambda z, o=original, e=entered, **kwargs: e.append(z) or o(z, **kwargs)
        before = keras.ops.convert_to_numpy(keras.tree.flatten(layer(x, **options))[0])
        z = keras.ops.convert_to_numpy(entered[0]).reshape(2, LENGTH, 4, -1)
        part = ft.heads(layer, [1])
        each = np.einsum("bqnh,nhm->nbqm", z, keras.ops.convert_to_numpy(output.kernel).reshape(4, z.shape[-1], -1))
        for path, variable in weights_by_path(layer).items():
            chosen = part[path].mask() if path in part else False
            variable.assign(np.where(chosen, 0, keras.ops.convert_to_numpy(variable)))
        after = keras.ops.convert_to_numpy(keras.tree.flatten(layer(x, **options))[0])
        np.testing.assert_allclose(after, before - each[1], rtol=1e-4, atol=1e-5, err_msg=kind)
