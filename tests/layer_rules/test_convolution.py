"""Slices of convolution kernels get the gradient that the composed read, plain Keras and NumPy give them, for less."""

import functools
import inspect
import math
import re

import keras
import numpy as np
import pytest
from helpers import cases, check_steps, moved_outside, values
from hypothesis import given, settings
from hypothesis import strategies as st

import finetooth as ft
from finetooth.regions.indexing import region_at

L = keras.layers
BACKEND = keras.backend.backend()
SEPARABLE = (L.SeparableConv1D, L.SeparableConv2D)
TRANSPOSED = (L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose)
FIRST = {"data_format": "channels_first"}
QUICK = {} if BACKEND == "jax" else {"run_eagerly": True}  # JAX compiles all the same, one operation after the other

# name -> shape of the input, layer
KINDS = {
    "causal": ((7, 3), L.Conv1D, (4, 3), {"padding": "causal", "dilation_rate": 2, "activation": "tanh"}),
    "strided": ((8, 3), L.Conv1D, (4, 3), {"padding": "same", "strides": 2}),
    "image": ((5, 4, 3), L.Conv2D, (4, 3), {"padding": "same"}),
    "large": ((2, 3, 3), L.Conv2D, (4, (6, 2)), {"padding": "same"}),
    "uneven": ((6, 7, 3), L.Conv2D, (4, (3, 2)), {"strides": (2, 3)}),
    "dilated": ((6, 5, 2), L.Conv2D, (3, 3), {"padding": "same", "dilation_rate": (1, 2), "use_bias": False}),
    "grouped": ((5, 4, 6), L.Conv2D, (9, 2), {"groups": 3}),
    "grouped_first": ((4, 5, 3), L.Conv2D, (6, 2), {"groups": 2, "padding": "same", **FIRST}),
    "first": ((3, 5, 4), L.Conv2D, (4, 2), {"padding": "same", **FIRST}),
    "volume": ((3, 3, 4, 2), L.Conv3D, (3, 2), {"padding": "same"}),
    "depthwise_line": ((7, 3), L.DepthwiseConv1D, (3,), {"dilation_rate": 2, "depth_multiplier": 2}),
    "depthwise": ((5, 6, 4), L.DepthwiseConv2D, (3,), {"depth_multiplier": 3, "padding": "same"}),
    "depthwise_first": ((3, 5, 6), L.DepthwiseConv2D, (2,), {"strides": 2, "activation": "tanh", **FIRST}),
    "separable_line": ((7, 3), L.SeparableConv1D, (4, 3), {"strides": 2, "padding": "same"}),
    "separable": ((4, 5, 3), L.SeparableConv2D, (4, 2), {"depth_multiplier": 2, "dilation_rate": 2}),
    "transposed_line": ((5, 3), L.Conv1DTranspose, (4, 3), {"strides": 2, "padding": "same"}),
    "transposed": ((3, 4, 3), L.Conv2DTranspose, (4, 3), {"strides": 2, "output_padding": 1}),
    "transposed_first": ((3, 4, 3), L.Conv2DTranspose, (4, 2), {"dilation_rate": 2, **FIRST}),
    "transposed_volume": ((2, 3, 2, 2), L.Conv3DTranspose, (3, 2), {}),
}


def made(layer, *args, name, **options):
    """The layer, with weights from NumPy: JAX would compile a random number generator for every shape."""
    rng = np.random.default_rng(len(name))
    drawn = {
        option: lambda shape, dtype=None: keras.ops.convert_to_tensor(rng.normal(0, 0.3, shape), dtype)
        for option in inspect.signature(layer).parameters
        if option.endswith("_initializer")
    }
    return layer(*args, **drawn, **options, name=name)


def layer_of(kind, **options):
    _, layer, args, own = KINDS[kind]
    return made(layer, *args, **{**own, **options}, name=kind)


def model_of(*kinds, dtype="float32"):
    """A branch for each kind, with something to train below it, so that a gradient goes through."""
    keras.backend.clear_session(free_memory=False)
    inputs, outputs = [], []
    for kind in kinds:
        shape = KINDS[kind][0]
        inputs.append(keras.Input(shape))
        x = made(L.Dense, shape[-1], "tanh", name=f"{kind}_below", dtype=dtype)(inputs[-1])
        x = layer_of(kind, dtype=dtype)(x)
        outputs.append(made(L.Dense, 2, name=f"{kind}_head", dtype=dtype)(L.Flatten()(x)))
    return keras.Model(inputs, L.Concatenate()(outputs) if len(kinds) > 1 else outputs[0])


def inputs_for(*kinds, examples=4):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(examples, *KINDS[kind][0])).astype("float32") for kind in kinds]


def step(model, kinds, mode):
    x, y = inputs_for(*kinds), np.linspace(-1, 1, 8 * len(kinds), dtype="float32").reshape(4, -1)
    model.compile(keras.optimizers.SGD(0.1), lambda y, p: keras.ops.sum((y - p) ** 2, axis=-1), **mode)
    model.train_on_batch(x, y)


def train(grids, kinds=KINDS, layer_rules=True, mode=QUICK, dtype="float32"):
    """The weights before and after a step of slices, by path; and how each slice got its gradient."""
    model = model_of(*kinds, dtype=dtype)
    before, x = values(model), inputs_for(*kinds)
    outputs = keras.ops.convert_to_numpy(model(x))
    part = ft.select(model, *grids.items(), "*_below/bias[1:]")
    with ft.tune(model, part, layer_rules=layer_rules) as tuning:
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(model(x)), outputs)
        step(model, kinds, mode)
        names = {row[0]: row[-1] for row in tuning.table().rows}
    after = values(model)
    assert moved_outside(before, after, part) == {}
    return before, after, {path: names[path] for path in grids}


@functools.cache
def kernels(*kinds):
    weights = values(model_of(*kinds))
    return {path: weight.shape for path, weight in weights.items() if path.split("/")[0] in kinds and "kernel" in path}


@functools.cache
def plain_step(**mode):
    """All weights after a step of plain Keras that trains everything."""
    model = model_of(*KINDS)
    step(model, KINDS, mode)
    return values(model)


def check_against_plain(grids, after, mode=QUICK):
    plain = plain_step(**mode)
    for path, index in [*grids.items(), *((f"{kind}_below/bias", np.s_[1:]) for kind in KINDS)]:
        region = region_at(plain[path].shape, index)
        np.testing.assert_allclose(region.gather(after[path]), region.gather(plain[path]), 1e-5, 2e-6, err_msg=path)


@st.composite
def grid(draw, shape):
    entries = []
    for n in shape:
        if draw(st.booleans()):
            entries.append(sorted(draw(st.sets(st.integers(0, n - 1), min_size=1))))
        else:
            start = draw(st.integers(0, n - 1))
            entries.append(slice(start, draw(st.integers(start + 1, n)), draw(st.integers(1, 2))))
    return tuple(entries)


def uneven_grids(*kinds):
    """Neighbouring taps, where there are enough, and channels that are no range: first and last, and every other."""
    return {
        path: (*(slice(n // 2, None) for n in taps), [0, rows - 1], slice(None, None, min(columns, 2)))
        for path, (*taps, rows, columns) in kernels(*kinds).items()
    }


# Each example compiles every kind of convolution anew: a minute and more on JAX.
@(pytest.mark.long if BACKEND == "jax" else lambda test: test)
@settings(max_examples=2 if BACKEND == "jax" else 4, deadline=None, derandomize=True)
@given(data=st.data())
def test_rules_equal_the_composed_read_and_plain_keras_for_any_grid(data):
    grids = {path: data.draw(grid(shape), label=path) for path, shape in kernels(*KINDS).items()}
    _, by_rule, names = train(grids)
    _, composed, dense_names = train(grids, layer_rules=False)
    for path, shape in kernels(*KINDS).items():
        whole = region_at(shape, grids[path]).size == math.prod(shape)
        assert (names[path], dense_names[path]) == (("own", "own") if whole else ("slice", "dense"))
    for path in by_rule:
        np.testing.assert_allclose(by_rule[path], composed[path], 1e-5, 2e-6, err_msg=path)
    check_against_plain(grids, by_rule)


if BACKEND == "tensorflow":

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_a_graph_and_a_compiled_one_equal_plain_keras(jit_compile):
        """Each with plain Keras in the same mode: TensorFlow's graphs are less exact where channels come first."""
        grids, mode = uneven_grids(*KINDS), {"jit_compile": jit_compile}
        before, after, names = train(grids, mode=mode)
        assert set(names.values()) == {"slice"}
        assert all((before[path] != after[path]).any() for path in grids)
        check_against_plain(grids, after, mode)


@pytest.mark.parametrize(
    "dtype", cases(["bfloat16", "mixed_bfloat16", "float16"], quick=lambda dtype: dtype == "mixed_bfloat16")
)
def test_rules_in_low_precision(dtype):
    kinds = ("causal", "separable", "transposed")
    before, by_rule, names = train(uneven_grids(*kinds), kinds, dtype=dtype)
    _, composed, _ = train(uneven_grids(*kinds), kinds, False, dtype=dtype)
    assert set(names.values()) == {"slice"}
    check_steps(by_rule, composed, before, names, 0.05)


def oracle(kind, shape, x, dy):
    """The gradient for a kernel of this shape in float64, tap by tap, from inputs and the gradient of outputs."""
    _, layer, _, options = KINDS[kind]
    if options.get("data_format") == "channels_first":
        x, dy = np.moveaxis(x, 1, -1), np.moveaxis(dy, 1, -1)
    if layer in TRANSPOSED:  # a convolution from outputs to inputs
        x, dy = dy, x
    groups = x.shape[-1] if "Depthwise" in layer.__name__ else options.get("groups", 1)
    x, dy = (value.reshape(*value.shape[:-1], groups, -1).astype(np.float64) for value in (x, dy))
    taps, sizes, steps = shape[:-2], dy.shape[1:-2], np.ones(len(shape) - 2, int)
    strides, dilation = steps * options.get("strides", 1), steps * options.get("dilation_rate", 1)
    span = (np.array(sizes) - 1) * strides + 1
    missing = np.maximum(span + (np.array(taps) - 1) * dilation - x.shape[1:-2], 0)
    before = {"causal": missing, "same": missing // 2}.get(options.get("padding"), 0 * missing)
    x = np.pad(x, [(0, 0), *zip(before, missing), (0, 0), (0, 0)])
    gradient = np.zeros(shape)
    for tap in np.ndindex(*taps):
        first = np.array(tap) * dilation
        window = x[:, *map(slice, first, first + span, strides)]
        pair = (value.reshape(-1, *value.shape[-2:]) for value in (window, dy))
        gradient[tap] = np.einsum("ngi,ngo->igo", *pair).reshape(shape[-2:])
    return gradient


def test_rules_equal_the_oracle():
    """With the loss sum(t * outputs) the gradient of the outputs is t."""
    kinds = [kind for kind in KINDS if KINDS[kind][1] not in SEPARABLE]
    inputs = [keras.Input(KINDS[kind][0]) for kind in kinds]
    outputs = [layer_of(kind, activation=None)(x) for kind, x in zip(kinds, inputs)]
    model = keras.Model(inputs, outputs)
    before, x, rng = values(model), inputs_for(*kinds), np.random.default_rng(1)
    t = [rng.normal(size=(4, *y.shape[1:])).astype("float32") for y in outputs]
    grids = {f"{kind}/kernel": uneven_grids(*KINDS)[f"{kind}/kernel"] for kind in kinds}
    with ft.tune(model, ft.select(model, *grids.items())):
        model.compile(keras.optimizers.SGD(1.0), [lambda t, y: keras.ops.sum(t * y)] * len(kinds), **QUICK)
        model.train_on_batch(x, t)
    after = values(model)
    for kind, inner, outer in zip(kinds, x, t):
        path = f"{kind}/kernel"
        region = region_at(before[path].shape, grids[path])
        gradient = region.gather(oracle(kind, region.shape, inner, outer))
        step = region.gather(after[path]) - region.gather(before[path])
        np.testing.assert_allclose(step, -gradient, 1e-4, 1e-5, err_msg=path)


def gradient_sizes(model, x):
    """The sizes of what convolutions compute in the gradient for the model's parts, inputs and outputs apart."""
    if BACKEND == "jax":
        import jax

        frozen = [v.value for v in model.non_trainable_variables]
        gradient = jax.grad(lambda trained: model.stateless_call(trained, frozen, x)[0].sum())
        equations = jax.make_jaxpr(gradient)([v.value for v in model.trainable_variables]).eqns
        shapes = [eqn.outvars[0].aval.shape for eqn in _flat(equations) if eqn.primitive.name == "conv_general_dilated"]
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        @tf.function(jit_compile=True)
        def gradient():
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(model(x))
            return tape.gradient(total, [v.value for v in model.trainable_variables])

        text = gradient.experimental_get_compiler_ir()(stage="optimized_hlo")  # without what nothing uses
        found = re.findall(r"= \w+\[([\d,]*)\]\S* convolution\(", text)
        shapes = [[int(length) for length in shape.split(",")] for shape in found]
    else:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        shapes = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                if function is torch.ops.aten.convolution_backward.default and result[1] is not None:
                    shapes.append(result[1].shape)
                return result

        total = model(x).sum()
        with Watch():
            total.backward()
    return {math.prod(shape) for shape in shapes if math.prod(shape) % len(x[0])}


def _flat(equations):
    import jax

    for equation in equations:
        yield equation
        for inner in jax.core.jaxprs_in_params(equation.params):
            yield from _flat(inner.eqns)


@pytest.mark.parametrize(
    "kind, index, computed",
    [
        ("image", np.s_[1, 1:, [0, 2], [1]], 1 * 2 * 2 * 1),
        ("image", np.s_[[0, 2], 1, :, :3], 3 * 1 * 3 * 3),  # the tap between the two comes along
        ("causal", np.s_[:2, 1:, 3], 2 * 2 * 1),
        ("strided", np.s_[:2, 1:, 3], 3 * 2 * 1),  # all taps
        ("grouped", np.s_[:, 1, 1, [3, 5, 6, 7]], 2 * 1 * 1 * 4),  # two outputs of each of two groups
        ("grouped", np.s_[:, 1, 1, [3, 4, 6]], 2 * 1 * 1 * 6),  # all of both
        ("depthwise", np.s_[2:, :, [1, 3], :2], 1 * 3 * 2 * 2),
        ("transposed", np.s_[1, :, :3, [0, 2]], 3 * 3 * 3 * 2),  # all taps
    ],
)
def test_no_dense_gradient_is_computed(kind, index, computed):
    for layer_rules, size in ((True, computed), (False, math.prod(*kernels(kind).values()))):
        model = model_of(kind)
        with ft.tune(model, ft.select(model, (f"{kind}/kernel", index)), layer_rules=layer_rules):
            assert gradient_sizes(model, inputs_for(kind, examples=7)) == {size}


def test_a_separable_layer_reads_each_kernel_in_its_own_way():
    mask = np.zeros((1, 1, 6, 4), bool)
    mask[0, 0, [0, 1, 3], [2, 0, 1]] = True
    first, second = "separable/depthwise_kernel", "separable/pointwise_kernel"
    for grids, expected in (
        ({first: np.s_[1, :, :2]}, {first: "slice"}),
        ({second: np.s_[..., [0, 3]]}, {second: "slice"}),
        ({first: np.s_[..., 1], second: mask}, {first: "slice", second: "dense"}),
        ({first: np.s_[:], second: np.s_[..., 2:5, 1]}, {first: "own", second: "slice"}),
    ):
        before, by_rule, names = train(grids, ["separable"])
        _, composed, _ = train(grids, ["separable"], False)
        assert names == expected
        for path in by_rule:
            np.testing.assert_allclose(by_rule[path], composed[path], 1e-5, 2e-6, err_msg=path)
        assert all((before[path] != by_rule[path]).any() for path in grids)


@pytest.mark.parametrize("options", [{"padding": "same"}, {"padding": "same", "strides": 2}, {"strides": 2}])
def test_inputs_of_any_size(options):
    results = []
    for layer_rules in (True, False):
        keras.utils.set_random_seed(0)
        layers = [L.Conv2D(4, 3, **options, name="layer"), L.GlobalAveragePooling2D(), L.Dense(2)]
        model = keras.Sequential([keras.Input((None, None, 3)), *layers])
        with ft.tune(model, "layer/kernel[1:, 2, :2, 1:]", layer_rules=layer_rules):
            model.compile(keras.optimizers.SGD(1.0), "mse")
            for size in (6, 7):
                x = np.random.default_rng(size).normal(size=(2, size, size + 1, 3))
                model.train_on_batch(x, np.ones((2, 2)))
        results.append(values(model)["layer/kernel"])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_single_elements_subclasses_and_adapted_layers_are_composed():
    class MyConv(L.Conv1D):
        """May read its kernel in any way."""

    inputs = keras.Input((6, 4))
    adapted = L.Conv1D(4, 2, name="adapted")
    model = keras.Model(inputs, L.Conv1D(2, 2, name="stock")(MyConv(4, 2, name="mine")(adapted(inputs))))
    adapted.enable_lora(1)
    mask = np.zeros((2, 4, 2), bool)
    mask[[0, 1], [1, 2], [0, 1]] = True
    part = ft.select(model, "adapted/kernel[0]", "mine/kernel[0]", ("stock/kernel", mask), "stock/bias[1]")
    with ft.tune(model, part) as tuning:
        assert len(tuning.table().rows) == 4
        assert {row[-1] for row in tuning.table().rows} == {"dense"}


if BACKEND == "torch":

    @pytest.mark.long
    @pytest.mark.filterwarnings("ignore")  # torch.compile warns about Keras, and about itself
    def test_compiled_layers_of_several_shapes():
        kinds = ("image", "depthwise")
        grids = uneven_grids(*kinds)
        _, composed, _ = train(grids, kinds, False)
        _, compiled, names = train(grids, kinds, mode={"jit_compile": True})
        assert set(names.values()) == {"slice"}
        for path in compiled:
            np.testing.assert_allclose(compiled[path], composed[path], 1e-5, 2e-6, err_msg=path)
