"""`select` and `heads`: everything a person may say, and what each says back when it cannot be done."""

import keras
import numpy as np
import pytest
from keras import layers

import finetooth as ft
from finetooth.keras_internals.weights import selectable, weights_by_path
from finetooth.regions.indexing import region_at
from finetooth.regions.region import Grid, Points, Whole


def small_model() -> keras.Model:
    x = inputs = keras.Input((4,))
    x = layers.Dense(6, activation="relu", name="first")(x)
    x = layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(3, name="second")(x), name="small")


def encoder(name: str = "encoder") -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(5, name="dense")(inputs), name=name)


@keras.saving.register_keras_serializable("finetooth_tests")
class Block(layers.Layer):
    """A layer that makes one weight early, in `__init__`, and holds another layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gain = self.add_weight(shape=(4,), initializer="ones", name="gain")
        self.inner = layers.Dense(4, name="inner")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x) * self.gain


@keras.saving.register_keras_serializable("finetooth_tests")
class Subclassed(keras.Model):
    """A subclassed model: blocks in a list, an inner model, a weight of its own, two layers of the same name."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [Block(name="block_0"), Block(name="block_1")]
        self.encoder = encoder()
        self.twins = [layers.Dense(5, name="twin"), layers.Dense(5, name="twin")]
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def build(self, shape):
        for block in self.blocks:
            block.build(shape)
        for twin in self.twins:
            twin.build((None, 5))
        self.built = True

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.encoder(x)
        for twin in self.twins:
            x = twin(x)
        return x * self.scale


def subclassed_model() -> keras.Model:
    model = Subclassed()
    model(np.zeros((1, 4), "float32"))
    return model


# --- what can be said ------------------------------------------------------------------------------------------------


def test_text_selects_by_path_and_index():
    part = ft.select(small_model(), "first/kernel[:, 1:3]", "*/bias", "second/kernel[[0, -1], 2]")
    assert dict(part.items()) == {
        "first/kernel": region_at((4, 6), np.s_[:, 1:3]),
        "first/bias": Whole((6,)),
        "second/kernel": region_at((6, 3), np.s_[[0, 5], 2]),
        "second/bias": Whole((3,)),
    }


def test_double_star_selects_everything_trainable():
    model = small_model()
    part = ft.select(model, "**")
    assert part.size == sum(np.prod(v.shape) for v in model.trainable_variables) and part.fraction == 1.0
    assert list(part) == ["first/kernel", "first/bias", "norm/gamma", "norm/beta", "second/kernel", "second/bias"]


def test_a_layer_a_nested_layer_and_an_inner_model_select_their_weights():
    model = subclassed_model()
    assert list(ft.select(model, model.blocks[1])) == ["block_1/gain", "block_1/inner/kernel", "block_1/inner/bias"]
    assert list(ft.select(model, model.blocks[0].inner)) == ["block_0/inner/kernel", "block_0/inner/bias"]
    assert list(ft.select(model, model.encoder)) == ["encoder/dense/kernel", "encoder/dense/bias"]
    assert ft.select(model, model.encoder) == ft.select(model, "encoder/**")
    assert ft.select(model, model) == ft.select(model, "**")


def test_a_variable_selects_itself_by_identity():
    model = subclassed_model()
    assert list(ft.select(model, model.scale)) == ["scale"] and ft.select(model, model.scale).size == 1
    assert list(ft.select(model, model.twins[1].kernel)) == ["twin/kernel#2"]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (np.s_[1:3], region_at((4, 6), np.s_[1:3])),
        (np.s_[..., -1], region_at((4, 6), np.s_[:, 5])),
        (2, region_at((4, 6), np.s_[2])),
        ([0, 3], region_at((4, 6), np.s_[[0, 3]])),
        (np.s_[[0, 1], [0, 5]], Grid((4, 6), [[0, 1], [0, 5]])),
        (np.eye(4, 6, dtype=bool), Points((4, 6), [0, 7, 14, 21])),
        (np.eye(4, 6, dtype=bool).tolist(), Points((4, 6), [0, 7, 14, 21])),
        (np.array([True, False, False, True]), region_at((4, 6), np.s_[[0, 3]])),
        (Points((4, 6), [1, 8]), Points((4, 6), [1, 8])),
    ],
)
def test_a_pair_selects_an_index_of_a_variable_or_of_text(index, expected):
    model = small_model()
    for target in (model.get_layer("first").kernel, "first/kernel"):
        assert dict(ft.select(model, (target, index)).items()) == {"first/kernel": expected}


def test_a_mask_may_be_a_tensor_of_the_backend():
    model = small_model()
    kernel = model.get_layer("first").kernel
    assert ft.select(model, (kernel, keras.ops.abs(kernel.value) > 0.3))["first/kernel"] == region_at(
        (4, 6), np.abs(keras.ops.convert_to_numpy(kernel)) > 0.3
    )


def test_a_predicate_is_asked_about_every_trainable_variable():
    asked = []
    part = ft.select(small_model(), lambda v: asked.append(v.name) or v.name == "bias")
    assert list(part) == ["first/bias", "second/bias"]
    assert asked == ["kernel", "bias", "gamma", "beta", "kernel", "bias"]


def test_a_selection_selects_itself_also_in_a_copy_of_the_model():
    model = subclassed_model()
    part = ft.select(model, "twin/kernel[0]", "twin/kernel#2[1]", "block_*/gain[:2]")
    assert ft.select(model, part) == part
    assert ft.select(subclassed_model(), part) == part
    assert ft.select(model, ft.Selection.from_dict(part.to_dict())) == part


def test_several_things_make_their_union():
    model = small_model()
    parts = ["first/kernel[0]", "first/kernel[:, 0]", model.get_layer("second"), ("first/bias", [1])]
    union = ft.select(model, *parts)
    assert union == ft.select(model, *reversed(parts))
    assert union == ft.select(model, parts[0]) | ft.select(model, *parts[1:])
    assert union["first/kernel"].mask().sum() == 4 + 6 - 1


def test_only_part_of_the_model_can_be_the_model():
    block = subclassed_model().blocks[0]
    assert len(ft.select(block, "**/inner/bias[:2]", block.gain)) == 6


# --- which variables there are, and their names ----------------------------------------------------------------------


def test_shared_layers_and_tied_weights_appear_once():
    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layers.ReversibleEmbedding(7, 4, tie_weights=True, name="embedding")
            self.again = self.embedding
            self.dense = layers.Dense(4, name="dense")

        def call(self, x):
            x = self.dense(self.dense(self.embedding(x)))
            return self.again(x, reverse=True)

    model = Tied()
    model(np.zeros((1, 2), "int32"))
    part = ft.select(model, "**", model.again, model.embedding)
    assert list(part) == ["embedding/embeddings", "dense/kernel", "dense/bias"]
    assert part.size == sum(np.prod(v.shape) for v in model.trainable_variables) == 7 * 4 + 4 * 4 + 4

    inputs = keras.Input((4,))
    shared = layers.Dense(4, name="shared")
    twice = keras.Model(inputs, shared(shared(inputs)))
    assert list(ft.select(twice, "**")) == ["shared/kernel", "shared/bias"]


def test_a_weight_that_one_layer_lends_another_is_named_by_the_layer_that_made_it():
    class Borrower(layers.Layer):
        def __init__(self, lender, **kwargs):
            super().__init__(**kwargs)
            self.lender = lender

        def call(self, x):
            return x @ keras.ops.transpose(self.lender.kernel)

    class Lending(keras.Model):
        def __init__(self):
            super().__init__()
            lender = layers.Dense(3, name="lender")
            self.borrower, self.lender = Borrower(lender, name="borrower"), lender

        def call(self, x):
            return self.borrower(self.lender(x))

    model = Lending()
    model(np.zeros((1, 4), "float32"))
    assert list(ft.select(model, "**")) == ["lender/kernel", "lender/bias"]
    assert list(ft.select(model, model.borrower)) == ["lender/kernel", "lender/bias"]


def test_frozen_layers_and_models_stay_selectable():
    model = small_model()
    everything = ft.select(model, "**")
    model.get_layer("first").trainable = False
    assert ft.select(model, "**") == everything and ft.select(model, model.get_layer("first")).size == 30
    model.trainable = False
    assert ft.select(model, "**") == everything


def test_statistics_are_passed_over_and_naming_one_is_an_error():
    model = small_model()
    norm = model.get_layer("norm")
    for what in ("norm/*", "norm/**", norm, lambda v: "norm" in v.path):
        assert list(ft.select(model, what)) == ["norm/gamma", "norm/beta"]
    with pytest.raises(ft.SelectionError, match=r"norm/moving_mean.*gradients do not train"):
        ft.select(model, "norm/moving_mean")
    with pytest.raises(ft.SelectionError, match="moving_variance.*statistics"):
        ft.select(model, norm.moving_variance)
    assert "norm/moving_mean" in weights_by_path(model) and "norm/moving_mean" not in selectable(model)


def test_random_states_and_integer_weights_are_no_weights_to_select():
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dropout(0.5), layers.Dense(2, name="dense"), layers.BatchNormalization(name="norm")]
    )
    assert list(ft.select(model, "**")) == ["dense/kernel", "dense/bias", "norm/gamma", "norm/beta"]


def sequential_model() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layers.Dense(4, name="a"), Block(name="b")])


def nested_sequential() -> keras.Model:
    inputs = keras.Input((4,))
    inner = keras.Sequential([layers.Dense(5, name="dense")], name="inner")
    return keras.Model(inputs, layers.Dense(2, name="head")(inner(inputs)))


def functional_in_sequential() -> keras.Model:
    model = keras.Sequential([encoder("backbone"), layers.Dense(2, name="head")])
    model.build((None, 4))
    return model


def two_encoders() -> keras.Model:
    inputs = keras.Input((4,))
    both = layers.Concatenate()([encoder("left")(inputs), encoder("right")(inputs)])
    return keras.Model(inputs, layers.Dense(2, name="head")(both))


def same_name_as_its_layer() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2, name="dense")(inputs), name="dense")


def recurrent() -> keras.Model:
    inputs = keras.Input((3, 4))
    x = layers.Bidirectional(layers.LSTM(2, name="memory"), name="both")(inputs)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


NAMES = {
    sequential_model: ["a/kernel", "a/bias", "b/gain", "b/inner/kernel", "b/inner/bias"],
    nested_sequential: ["inner/dense/kernel", "inner/dense/bias", "head/kernel", "head/bias"],
    functional_in_sequential: ["backbone/dense/kernel", "backbone/dense/bias", "head/kernel", "head/bias"],
    two_encoders: [
        *("left/dense/kernel", "left/dense/bias", "right/dense/kernel", "right/dense/bias"),
        *("head/kernel", "head/bias"),
    ],
    same_name_as_its_layer: ["dense/kernel", "dense/bias"],
    recurrent: [
        f"both/{way}_memory/lstm_cell/{name}"
        for way in ("forward", "backward")
        for name in ("kernel", "recurrent_kernel", "bias")
    ]
    + ["head/kernel", "head/bias"],
    subclassed_model: [
        *("scale", "block_0/gain", "block_0/inner/kernel", "block_0/inner/bias"),
        *("block_1/gain", "block_1/inner/kernel", "block_1/inner/bias"),
        *("encoder/dense/kernel", "encoder/dense/bias"),
        *("twin/kernel", "twin/bias", "twin/kernel#2", "twin/bias#2"),
    ],
}


@pytest.mark.parametrize("make", NAMES, ids=lambda make: make.__name__)
def test_weights_are_named_by_their_layers_before_and_after_saving(make, tmp_path):
    model = make()
    assert list(weights_by_path(model)) == list(selectable(model)) == NAMES[make]
    assert [v.path for v in weights_by_path(model).values()] == [v.path for v in model.weights]
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert list(weights_by_path(loaded)) == NAMES[make]
    for path, variable in weights_by_path(loaded).items():
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(variable), keras.ops.convert_to_numpy(weights_by_path(model)[path])
        )


def test_an_inner_model_names_its_weights_from_itself():
    model = two_encoders()
    assert list(weights_by_path(model.get_layer("left"))) == ["dense/kernel", "dense/bias"]
    inner = functional_in_sequential().get_layer("backbone")
    assert list(ft.select(inner, "dense/kernel")) == ["dense/kernel"]


def test_keras_own_paths_are_understood_too():
    model = nested_sequential()
    sequential = sequential_model()
    for known in (model, sequential):
        for path, variable in weights_by_path(known).items():
            assert list(ft.select(known, variable.path)) == [path]
    assert list(ft.select(sequential, f"{sequential.name}/a/*[0]")) == ["a/kernel", "a/bias"]


def test_a_star_does_not_stand_for_the_model():
    with pytest.raises(ft.SelectionError, match="selects nothing"):
        ft.select(sequential_model(), "*/a/kernel")


def test_a_variable_that_is_called_like_a_numbered_twin_is_not_lost():
    class Odd(keras.Model):
        def __init__(self):
            super().__init__()
            self.own = [self.add_weight(shape=(n,), name=name) for n, name in ((1, "w#2"), (2, "w"), (3, "w"))]

        def call(self, x):
            return x

    model = Odd()
    model.build((None, 1))
    assert {path: v.shape for path, v in weights_by_path(model).items()} == {"w#2": (1,), "w": (2,), "w#3": (3,)}


# --- attention heads -------------------------------------------------------------------------------------------------


def attention(queries=4, group=1, value_dim=None, use_bias=True, use_gate=False) -> keras.Layer:
    if group == 1:
        layer = layers.MultiHeadAttention(
            queries, 3, value_dim=value_dim, use_bias=use_bias, use_gate=use_gate, name="attention"
        )
    else:
        layer = layers.GroupQueryAttention(
            3, queries, queries // group, use_bias=use_bias, use_gate=use_gate, name="attention"
        )
    layer.build((1, 2, 8), (1, 5, 8))
    return layer


def test_a_head_is_its_slices_of_the_projections_and_its_rows_of_the_output():
    part = ft.heads(attention(value_dim=5), [2, 0])
    assert dict(part.items()) == {
        "attention/query/kernel": region_at((8, 4, 3), np.s_[:, [0, 2]]),
        "attention/query/bias": region_at((4, 3), np.s_[[0, 2]]),
        "attention/key/kernel": region_at((8, 4, 3), np.s_[:, [0, 2]]),
        "attention/key/bias": region_at((4, 3), np.s_[[0, 2]]),
        "attention/value/kernel": region_at((8, 4, 5), np.s_[:, [0, 2]]),
        "attention/value/bias": region_at((4, 5), np.s_[[0, 2]]),
        "attention/attention_output/kernel": region_at((4, 5, 8), np.s_[[0, 2]]),
    }


def test_heads_without_bias_have_kernels_only():
    part = ft.heads(attention(use_bias=False), 1)
    assert [path.split("/", 1)[1] for path in part] == [
        *("query/kernel", "key/kernel", "value/kernel", "attention_output/kernel")
    ]
    assert part.size == 4 * 8 * 3


def test_heads_are_counted_like_numpy_counts():
    layer = attention()
    assert ft.heads(layer, -1) == ft.heads(layer, [3]) == ft.heads(layer, (3,)) == ft.heads(layer, range(3, 4))
    assert ft.heads(layer, np.s_[::2]) == ft.heads(layer, np.array([True, False, True, False]))
    assert ft.heads(layer, [0, 1]) | ft.heads(layer, [2, 3]) == ft.heads(layer, np.s_[:])


def test_a_key_value_head_is_selected_only_with_all_of_its_query_heads():
    layer = attention(queries=6, group=3)
    one, whole = ft.heads(layer, [0, 1, 4]), ft.heads(layer, [3, 4, 5, 0])
    assert [path.split("/", 1)[1] for path in one] == ["query/kernel", "query/bias", "attention_output/kernel"]
    assert one["attention/query/kernel"] == region_at((8, 6, 3), np.s_[:, [0, 1, 4]])
    assert whole["attention/key/kernel"] == whole["attention/value/kernel"] == region_at((8, 2, 3), np.s_[:, 1])
    assert whole["attention/key/bias"] == whole["attention/value/bias"] == region_at((2, 3), np.s_[1])
    assert whole["attention/attention_output/kernel"] == region_at((6, 3, 8), np.s_[[0, 3, 4, 5]])


@pytest.mark.parametrize("group", [1, 2])
def test_gates_belong_to_the_query_heads(group):
    part = ft.heads(attention(group=group, use_gate=True), [1])
    assert part["attention/gate/kernel"] == region_at((8, 4, 3), np.s_[:, 1])
    assert part["attention/gate/bias"] == region_at((4, 3), np.s_[1])


@pytest.mark.parametrize("use_gate", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("group", "which"), [(1, [1]), (1, [0, 3]), (2, [0]), (2, [2, 3]), (2, [1, 2, 3])])
def test_changing_the_elements_of_some_heads_changes_those_heads_only(group, which, use_gate, rng):
    layer = attention(group=group, use_gate=use_gate)
    x, y = rng.normal(size=(2, 3, 8)).astype("float32"), rng.normal(size=(2, 5, 8)).astype("float32")
    output = weights_by_path(layer)["attention/attention_output/kernel"]
    kernel = keras.ops.convert_to_numpy(output).copy()

    def output_of(heads: list[int]) -> np.ndarray:
        """What these heads add to the output: the output kernel is zero for all others."""
        shown = np.zeros_like(kernel)
        shown[heads] = kernel[heads]
        output.assign(shown)
        return keras.ops.convert_to_numpy(layer(x, y))

    others = [head for head in range(4) if head not in which]
    before, chosen_before = output_of(others), output_of(which)
    for path, region in ft.heads(layer, which).items():
        variable = weights_by_path(layer)[path]
        value = kernel if variable is output else keras.ops.convert_to_numpy(variable)
        changed = region.scatter(value, region.gather(value) + rng.normal(size=region.compact_shape))
        if variable is output:
            kernel = changed
        else:
            variable.assign(changed)
    np.testing.assert_array_equal(output_of(others), before)
    assert np.abs(output_of(which) - chosen_before).max() > 0.01


def nested_attention() -> keras.Model:
    """The same layer names in an inner model and outside of it, in a subclassed model."""

    class Inner(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.attention = layers.MultiHeadAttention(2, 3, name="attention")

        def call(self, x):
            return self.attention(x, x)

    inputs = keras.Input((5, 8))
    x = layers.MultiHeadAttention(2, 3, name="attention")(inputs, inputs)
    inner_inputs = keras.Input((5, 8))
    inner = keras.Model(
        inner_inputs, layers.MultiHeadAttention(2, 3, name="attention")(inner_inputs, inner_inputs), name="inner"
    )
    return keras.Model(inputs, Inner(name="subclassed")(inner(x)))


def test_heads_fit_into_the_model_that_has_the_layer_wherever_it_sits():
    model = nested_attention()
    for prefix, layer in (
        ("", model.get_layer("attention")),
        ("inner/", model.get_layer("inner").get_layer("attention")),
        ("subclassed/", model.get_layer("subclassed").attention),
    ):
        part, expected = ft.heads(layer, [1]), {f"{prefix}attention/{p}" for p in ("query/kernel", "key/bias")}
        assert expected <= set(ft.select(model, part))
        assert all(path.startswith(f"{prefix}attention/") for path in ft.select(model, part))
        everything = ft.select(model, "**")
        assert everything & part == ft.select(model, part)
        assert (everything - part).size == everything.size - part.size
        assert everything | part == everything


@pytest.mark.parametrize(
    ("which", "said"),
    [
        (4, "Heads of 'attention'.*4 is out of range"),
        ([0, -5], "Heads of 'attention'.*-5 is out of range"),
        ([], "The selection is empty"),
        ("first", "Heads of 'attention'.*'first'"),
        ([0.5], "Heads of 'attention'"),
        (np.ones(3, bool), r"Heads of 'attention'.*\(3,\)"),
    ],
)
def test_heads_that_are_not_there_are_an_error(which, said):
    with pytest.raises(ft.SelectionError, match=said):
        ft.heads(attention(), which)


def test_heads_of_something_else_are_an_error():
    dense = small_model().get_layer("first")
    with pytest.raises(ft.SelectionError, match="such as MultiHeadAttention, that has num_heads.*; received Dense"):
        ft.heads(dense, [0])
    with pytest.raises(ft.SelectionError, match="Build it first"):
        ft.heads(layers.MultiHeadAttention(2, 3), [0])


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("first/kernel[0, x]", r"at column 17:\n  first/kernel\[0, x\]\n {18}\^"),
        ("first/kernel[4]", "first/kernel: Index 4 is out of range for axis 0 of size 4"),
        ("first/kernel[0, 0, 0]", r"first/kernel: 3 indices for a tensor of rank 2 and shape \(4, 6\)"),
        (("first/kernel", np.ones((6, 4), bool)), r"first/kernel: A mask of shape \(6, 4\) does not fit.*\(4, 6\)"),
        (("first/kernel", Points((24,), [1])), r"first/kernel.*\(24,\).*\(4, 6\)"),
        (("first/kernel[0]", 1), "has an index already"),
        ("first/kernel[2:2]", "The selection is empty"),
        (lambda v: False, "The selection is empty"),
        (("first/kernel", []), "The selection is empty"),
        ("frist/kernel", r"no variable path matches 'frist/kernel'. Nearest paths: \['first/kernel'"),
        ("zzz", r"Nearest paths: \['first/kernel', .*finetooth inspect"),
        ("first", r"'first' is a layer. Use 'first/\*\*'"),
        ("first/", r"Use 'first/\*\*'"),
        ("fi*[0]", r"Use 'fi\*/\*\*'"),
        (7, "Cannot select by 7 of type int. Expected text, a layer"),
        (None, "Cannot select by None"),
        (["first/kernel"], "a list of several items. Pass them one by one"),
        (("first/kernel", "second/kernel"), "a tuple of several items. Pass them one by one.*'b/kernel'"),
        (("first/kernel", "first/bias", "second/bias"), "a tuple of several items"),
        (("first/kernel", lambda v: True), "a tuple of several items"),
        ({"first/kernel"}, "a set of several items"),
        ([], r"Cannot select by \[\] of type list"),
        (("first/kernel", np.ones((4, 6))), r"received an array of shape \(4, 6\) and dtype float64.$"),
        (("first/kernel", "x" * 1000), r"x{150,200}\.\.\. is a tuple of several items"),
        (("first/kernel", 0, 0), "Cannot select by .* of type tuple"),
        ((3, 0), "Cannot select by 3"),
        (b"first/kernel", "of type bytes"),
        (layers.Dense, "of type type"),
        (np.ones((4, 6), bool), "of type ndarray"),
        (layers.Dense(2, name="unbuilt"), "'unbuilt' selects nothing.*it has no weights"),
    ],
)
def test_what_cannot_be_selected_is_one_clear_error(what, said):
    with pytest.raises(ft.SelectionError, match=said) as caught:
        ft.select(small_model(), what)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, ft.FinetoothError)


def test_nothing_said_is_an_empty_selection():
    for call in (ft.select, ft.tune):
        with pytest.raises(
            ft.SelectionError, match="The selection is empty: nothing was named. Pass at least one item"
        ):
            call(small_model())


def test_a_variable_or_layer_of_another_model_is_an_error():
    model, other = small_model(), small_model()
    with pytest.raises(ft.SelectionError, match="'first/kernel' is not a trainable weight of 'small'"):
        ft.select(model, other.get_layer("first").kernel)
    with pytest.raises(ft.SelectionError, match="'first' selects nothing in 'small'"):
        ft.select(model, other.get_layer("first"))


def test_a_selection_of_another_model_is_an_error_where_it_does_not_fit():
    model = small_model()
    with pytest.raises(ft.SelectionError, match=r"holds 'dense/kernel' of shape \(4, 5\), which 'small' does not have"):
        ft.select(model, ft.select(encoder(), "**"))
    inputs = keras.Input((9,))
    wider = keras.Model(inputs, layers.Dense(6, name="first")(inputs))
    with pytest.raises(ft.SelectionError, match=r"'first/kernel' of shape \(9, 6\)"):
        ft.select(model, ft.select(wider, "first/kernel[0]"))


def test_a_selection_of_a_model_with_other_automatic_names_says_what_to_do():
    def automatic():
        return keras.Sequential([keras.Input((4,)), layers.Dense(6), layers.Dense(6)])

    first, second = automatic(), automatic()
    with pytest.raises(
        ft.SelectionError, match="'dense/kernel'.*nearest of that shape is 'dense_2/kernel'.*clone_model"
    ):
        ft.select(second, ft.select(first, "dense/kernel[0]"))
    copy = keras.models.clone_model(first)
    assert list(ft.select(copy, ft.select(first, "dense/kernel[0]"))) == ["dense/kernel"]


@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_a_quantized_weight_is_said_to_be_quantized(mode):
    model = small_model()
    model.get_layer("first").quantize(mode)
    known = selectable(model)
    untrained = next(v for path, v in weights_by_path(model).items() if path.startswith("first") and path not in known)
    for what in (f"first/{untrained.name}", untrained):
        with pytest.raises(ft.SelectionError, match=f"first/{untrained.name}.*quantized") as caught:
            ft.select(model, what)
        assert "statistics=" not in str(caught.value)


def test_an_integer_variable_is_an_index_and_a_weight_is_not():
    model = small_model()
    kernel, rows = model.get_layer("first").kernel, keras.Variable([0, 2], dtype="int32", trainable=False)
    assert ft.select(model, (kernel, rows)) == ft.select(model, (kernel, [0, 2]))
    with pytest.raises(ft.SelectionError, match="several items"):
        ft.select(model, (kernel, model.get_layer("second").kernel))


def test_an_unbuilt_model_or_no_model_is_an_error():
    unbuilt = keras.Sequential([layers.Dense(2)], name="unbuilt")
    with pytest.raises(ft.SelectionError, match="'unbuilt' has no weights yet. Build it first"):
        ft.select(unbuilt, "**")
    for nothing in (None, "model", 3, small_model):
        with pytest.raises(ft.SelectionError, match="Expected a Keras model or layer"):
            ft.select(nothing, "**")


def test_a_model_without_weights_selects_nothing():
    inputs = keras.Input((4,))
    with pytest.raises(ft.SelectionError, match="selects nothing"):
        ft.select(keras.Model(inputs, layers.Flatten()(inputs)), "**")
