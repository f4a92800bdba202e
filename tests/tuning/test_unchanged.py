"""What a user does to a model while it is tuned: refused before anything changes, or harmless."""

import keras
import numpy as np
import pytest
from helpers import moved_inside, moved_outside, values

import finetooth as ft

L = keras.layers
X = np.random.default_rng(0).normal(size=(16, 5)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 3)).astype("float32")


def sequential():
    inner = keras.Sequential([keras.Input((6,)), L.Dense(4, name="b")], name="inner")
    return keras.Sequential([keras.Input((5,)), L.Dense(6, name="a"), inner, L.Dense(3, name="c")])


class Backbone(keras.Model):
    """A model with an `enable_lora` of its own, as KerasHub's have."""

    def __init__(self):
        super().__init__(name="backbone")
        self.blocks = [L.Dense(5, name="a"), L.Dense(3, name="c")]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def enable_lora(self, rank):
        for block in self.blocks:
            block.enable_lora(rank)


def state(model):
    """All that must not change when something is refused."""
    layers = model._flatten_layers()
    return {
        "layers": [(id(layer), layer.trainable, layer.dtype_policy.name, sorted(vars(layer))) for layer in layers],
        "variables": [(id(v), v.trainable, v.dtype, str(v.shape)) for v in model.variables],
        "trained": [id(v) for v in model.trainable_variables],
    }


def fit(model, optimizer=None):
    model.compile(optimizer or keras.optimizers.AdamW(0.1), "mse", run_eagerly=keras.backend.backend() != "jax")
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)


def set_to(name, value):
    return lambda thing: setattr(thing, name, value)


REFUSED = {
    "quantize the model": lambda m: m.quantize("int8"),
    "quantize the model to int4": lambda m: m.quantize("int4"),
    "quantize a tuned layer": lambda m: m.get_layer("a").quantize("int8"),
    "quantize a frozen layer": lambda m: m.get_layer("c").quantize("int8"),
    "quantize the inner model": lambda m: m.get_layer("inner").quantize("int8"),
    "a quantised dtype policy": lambda m: set_to("dtype_policy", "int8_from_float32")(m.get_layer("c")),
    "another dtype policy": lambda m: set_to("dtype_policy", "mixed_bfloat16")(m.get_layer("a")),
    "LoRA in a tuned layer": lambda m: m.get_layer("a").enable_lora(2),
    "LoRA in a layer of the inner model": lambda m: m.get_layer("inner").get_layer("b").enable_lora(2),
    "build a layer again": lambda m: m.get_layer("a").build((None, 5)),
    "a new weight of a layer": lambda m: m.get_layer("a").add_weight(shape=(2,), name="new"),
    "a new weight of the model": lambda m: m.add_weight(shape=(2,), name="new"),
    "another layer": lambda m: m.add(L.Dense(2)),
    "one layer less": lambda m: m.pop(),
    "one layer less inside": lambda m: m.get_layer("inner").pop(),
    "thaw the model": set_to("trainable", True),
    "freeze the model": set_to("trainable", False),
    "thaw a tuned layer": lambda m: set_to("trainable", True)(m.get_layer("a")),
    "freeze a tuned layer": lambda m: set_to("trainable", False)(m.get_layer("a")),
    "thaw a frozen layer": lambda m: set_to("trainable", True)(m.get_layer("c")),
    "thaw the inner model": lambda m: set_to("trainable", True)(m.get_layer("inner")),
    "thaw the base of a part": lambda m: set_to("trainable", True)(m.get_layer("a").kernel),
    "thaw a frozen weight": lambda m: set_to("trainable", True)(m.get_layer("c").kernel),
    "freeze a weight that trains": lambda m: set_to("trainable", False)(m.get_layer("a").bias),
}


@pytest.fixture(scope="module")
def tuned():
    """A tuned model and its state; nothing that is refused changes it, so all tests can have the same."""
    model = sequential()
    with ft.tune(model, ft.select(model, "a/kernel[:, :4]", "a/bias")) as tuning:
        yield model, state(model), values(model)
        fit(model)  # and it trains as if nothing had been tried
        assert tuning.verify() and sum(change.moved for _, change in tuning.patch.items()) == 5 * 4 + 6


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_change_weights_or_what_trains_is_refused_at_the_door(tuned, what):
    model, before, weights = tuned
    with pytest.raises(ft.TuningError, match=r"is being tuned.*Call finish\(\) or revert\(\)"):
        REFUSED[what](model)
    assert state(model) == before
    assert all(np.array_equal(value, weights[path]) for path, value in values(model).items())


def test_a_backbone_enables_lora_in_none_of_its_layers():
    model = Backbone()
    model(X)
    with ft.tune(model, "c/kernel[0]"):
        before = state(model)
        with pytest.raises(ft.TuningError, match="enable_lora"):
            model.enable_lora(2)
        assert state(model) == before
    model.enable_lora(2)
    assert all(block.lora_enabled for block in model.blocks)


def test_what_changes_nothing_is_allowed(tuned):
    model, before, _ = tuned
    model.get_layer("c").trainable = False
    model.get_layer("inner").trainable = False
    model.get_layer("a").bias.trainable = True
    model.get_layer("c").kernel.trainable = False
    model.get_layer("a").dtype_policy = "float32"
    model.build((None, 5))
    assert state(model) == before


def test_a_layer_that_trains_as_a_whole_can_be_set_trainable():
    model = keras.Sequential([keras.Input((5,)), L.Dense(6, name="a"), L.Dropout(0.5), L.Dense(3, name="c")])
    with ft.tune(model, "**"):
        before = [id(v) for v in model.trainable_variables]
        model.trainable = True
        assert [id(v) for v in model.trainable_variables] == before
    with ft.tune(model, "c/*"):
        model.get_layer("c").trainable = True
        with pytest.raises(ft.TuningError, match="trainable"):
            model.trainable = True
    assert [layer.trainable for layer in model.layers] == [True] * 3
    model.trainable = False  # as ever afterwards
    model.trainable = True
    assert len(model.trainable_variables) == 4


ADDED = {
    "layer": lambda: L.Dense(3),
    "list of layers": lambda: [L.Dense(3)],
    "variable": lambda: keras.Variable(np.ones(3, "float32"), name="new"),
}


@pytest.mark.parametrize("what", ADDED)
def test_layers_and_weights_without_a_door_are_found_before_the_next_step(what):
    """A Functional model can be given layers that are not in its graph, which count as its own from then on."""
    inputs = keras.Input((5,))
    model = keras.Model(inputs, L.Dense(3, name="c")(L.Dense(6, name="a")(inputs)))
    before = values(model)
    with ft.tune(model, "c/kernel[0]") as tuning:
        model.compile("adam", "mse")
        model.new = ADDED[what]()
        for train in (model.fit, model.train_on_batch):
            with pytest.raises(ft.TuningError, match="have changed since its tuning began.*Change them back"):
                train(X, Y)
        assert all(np.array_equal(values(model)[path], value) for path, value in before.items())
        assert tuning.patch["c/kernel"].moved == 0


def test_a_model_of_shared_layers_cannot_thaw_them():
    first = keras.Sequential([keras.Input((5,)), L.Dense(6, name="a"), L.Dense(3, name="c")])
    frozen, outer = (keras.Sequential([first, L.Dense(3, name="head")]) for _ in range(2))
    frozen.trainable = False
    before = values(first)
    with ft.tune(first, "a/kernel[:, :2]") as tuning:
        at_first = state(first)
        with pytest.raises(ft.TuningError, match="is being tuned: `trainable` cannot become"):
            frozen.trainable = True
        with pytest.raises(ft.TuningError, match="is being tuned: `quantize"):
            outer.get_layer(first.name).quantize("int8")
        assert state(first) == at_first
        outer.get_layer("head").trainable = False  # which is not tuned
        fit(outer)
        assert tuning.verify()
    assert moved_outside(before, values(first), tuning.selection) == {}
    assert moved_inside(before, values(first), tuning.selection) == {"a/kernel": 10}


# Variables that two models share through different layers.


class Reads(L.Layer):
    """A layer that reads a variable which another layer made."""

    def __init__(self, of, **options):
        super().__init__(**options)
        self.w = of

    def call(self, x):
        return keras.ops.matmul(x, self.w)


def two_models():
    made = L.Dense(4, name="e", use_bias=False)
    one = keras.Sequential([keras.Input((4,)), made])
    other = keras.Sequential([keras.Input((4,)), Reads(made.kernel, name="reads"), L.Dense(2, name="h")])
    return one, other, made.kernel


@pytest.mark.parametrize("what", ["h/kernel[:, 0]", "reads/kernel[:, 1:]"])
@pytest.mark.parametrize("first", [0, 1])
def test_models_that_share_a_variable_are_tuned_one_after_the_other(what, first):
    one, other, kernel = two_models()
    pair = [(one, "e/kernel[:, :2]"), (other, what)]
    (a, part_of_a), (b, part_of_b) = pair[first], pair[1 - first]
    tuning = ft.tune(a, part_of_a)
    flags, kind = [v.trainable for v in b.weights], type(kernel)
    with pytest.raises(ft.TuningError, match="weight of it, is being tuned already"):
        ft.tune(b, part_of_b)
    assert [v.trainable for v in b.weights] == flags and type(kernel) is kind
    tuning.finish()
    assert kernel.trainable
    ft.tune(b, part_of_b).finish()
    assert kernel.trainable and len(one.trainable_variables) == 1 and len(other.trainable_variables) == 3


def test_optimizers_and_parts_of_a_tuned_models_variables():
    """What was made before waits for the end of the tuning, and goes on then."""
    model = keras.Sequential([keras.Input((5,)), L.Dense(6, name="a"), L.Dense(3, name="c")])
    base, frozen = model.get_layer("a").kernel, model.get_layer("c").kernel
    part = ft.Part(base, np.s_[0])
    ones = [keras.ops.ones(base.shape), keras.ops.ones(frozen.shape)]
    selective = ft.SelectiveOptimizer(keras.optimizers.SGD(1.0, momentum=0.9), [(base, np.s_[0]), (frozen, np.s_[:1])])
    lazy = ft.LazyOptimizer(keras.optimizers.SGD(1.0))
    for optimizer in (selective, lazy):
        optimizer.apply(ones, [base, frozen])
    before = values(model)
    with ft.tune(model, "a/kernel[:2]") as tuning:
        for optimizer in (selective, lazy, ft.LazyOptimizer(keras.optimizers.SGD(1.0))):
            for gradients, variables in ((ones, [base, frozen]), (ones[1:], [frozen])):
                with pytest.raises(ft.TuningError, match="frozen while its model is being tuned"):
                    optimizer.apply(gradients, variables)
        with pytest.raises(ft.PartError, match="is being tuned"):
            part.assign(0.0)
        for variable in (base, frozen):
            with pytest.raises(ft.FinetoothError, match="being tuned"):
                optimizer = ft.SelectiveOptimizer(keras.optimizers.SGD(1.0), [(variable, np.s_[0])])
                optimizer.apply([keras.ops.ones(variable.shape)], [variable])
        with pytest.raises(ft.PartError, match="frozen while its model is being tuned"):
            ft.gradients(lambda: keras.ops.sum(frozen**2), ft.Part(frozen, np.s_[0]))
        assert tuning.verify()
        assert all(np.array_equal(value, before[path]) for path, value in values(model).items())
    selective.apply(ones, [base, frozen])
    after = values(model)
    np.testing.assert_allclose(after["a/kernel"][0], before["a/kernel"][0] - 1.9, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(after["a/kernel"][1:], before["a/kernel"][1:])


# LoRA that was enabled before.


def with_lora():
    keras.utils.set_random_seed(0)
    layers = [L.Embedding(10, 8, name="e"), L.EinsumDense("abc,cd->abd", (3, 6), name="q"), L.Dense(4, name="d")]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers, L.Flatten()])
    for layer in layers:
        layer.enable_lora(2)
    for i, variable in enumerate(v for v in model.weights if "lora" in v.name):  # Keras begins with zeros
        variable.assign(np.random.default_rng(i).normal(size=variable.shape))
    return model


LORA = {
    "**": 10,
    "e/embeddings[:4]": 1,
    "q/kernel[:, :2]": 1,
    "d/kernel[:, :2]": 1,
    "*/lora_*_a": 3,
    "d/lora_kernel_a[:, :1]": 1,
    "q/*": 3,
}


@pytest.mark.parametrize("what", LORA)
def test_a_model_with_lora_trains_and_says_what_is_selected(what):
    tokens, targets = np.arange(24).reshape(8, 3) % 10, np.random.default_rng(0).normal(size=(8, 12))
    eager = {"run_eagerly": keras.backend.backend() != "jax"}
    model, plain = with_lora(), with_lora()
    before = values(model)
    with ft.tune(model, what) as tuning:
        table = str(tuning)
        model.compile(keras.optimizers.SGD(0.5), "mse", **eager)
        model.train_on_batch(tokens, targets)
    assert moved_outside(before, values(model), tuning.selection) == {}
    for variable in plain.weights:  # the oracle: Keras, with LoRA's frozen kernels thawed
        variable.trainable = True
    plain.compile(keras.optimizers.SGD(0.5), "mse", **eager)
    plain.train_on_batch(tokens, targets)
    for path, region in tuning.selection.items():
        expected, trained = region.gather(values(plain)[path]), region.gather(values(model)[path])
        np.testing.assert_allclose(trained, expected, rtol=1e-5, atol=1e-6)
        assert (trained != region.gather(before[path])).any()
    lora = {path for path in before if "lora" in path}
    frozen = lora - set(tuning.selection)
    assert len(dict(tuning.selection.items())) == LORA[what] and len(lora) == 6
    _, said = "".join(table.split("\n")).split("LoRA variables that stay frozen:")
    assert {name.strip() for name in said.split(",")} == (frozen or {"none"})
    assert all(f"  {path}" in table for path in tuning.selection)


def test_a_model_without_lora_says_nothing_about_it(tuned):
    model, _, _ = tuned
    assert "LoRA" not in str(vars(model)["_finetooth_tuning"])
