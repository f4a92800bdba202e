"""Single elements and blocks of a kernel: three ways to their gradient, all equal to plain Keras."""

import keras
import numpy as np
import pytest
from helpers import cases, check_steps, moved_outside, values

import finetooth as ft
from finetooth.layer_rules import elements
from finetooth.regions.region import Points

L = keras.layers
RNG = np.random.default_rng(0)


def scattered(shape, count):
    mask = np.zeros(np.prod(shape), bool)
    mask[RNG.choice(mask.size, count, replace=False)] = True
    return mask.reshape(shape)


def blocks(shape, side, count):
    grid = scattered((shape[0] // side, shape[1] // side), count)
    return np.kron(grid, np.ones((side, side), bool)).astype(bool)


PRECISE = [("bfloat16", "sampled"), ("float16", "blocks")]
MASKS = {
    "dense": scattered((256, 256), 16_000),
    "sampled": scattered((256, 256), 40),
    "blocks": np.kron(np.eye(4, dtype=bool) & (np.arange(4) < 2), np.ones((64, 64), bool)),
}


@pytest.mark.parametrize("way", MASKS)
def test_the_way_follows_from_the_density(way):
    region = Points((256, 256), np.flatnonzero(MASKS[way]))
    assert elements.sampler(region, 1).name == way


@pytest.mark.parametrize("make", ["WholeProduct", "SampledProduct", "BlockProduct"])
def test_each_way_gives_the_elements_of_the_product(make):
    mask = MASKS["blocks"]
    rows, columns = np.nonzero(mask)
    side = (64,) if make == "BlockProduct" else ()
    sampler = getattr(elements, make)((256, 256), rows, columns, *side)
    x, dy = RNG.normal(size=(10, 256)), RNG.normal(size=(10, 256))
    dtype = "float32" if keras.backend.backend() == "jax" else "float64"  # which JAX has off
    given = (keras.ops.convert_to_tensor(array, dtype) for array in (x, dy))
    product = keras.ops.convert_to_numpy(sampler.product(*given))
    assert product.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(product, (x.T @ dy)[mask], rtol=tolerance, atol=tolerance)


def test_the_largest_blocks_are_found_and_what_is_not_quite_blocks_is_not():
    shape = (512, 1024)
    for side in elements.BLOCKS:
        rows, columns = np.nonzero(blocks(shape, side, 2))
        assert elements._side(shape, rows, columns) >= side
    mask = blocks(shape, 64, 4)
    mask[np.nonzero(mask)[0][0], np.nonzero(mask)[1][0]] = False
    mask[511, 1023] = True  # as many points as before
    assert elements._side(shape, *np.nonzero(mask)) is None
    assert elements._side((100, 100), *np.nonzero(np.ones((100, 100), bool))) is None


def dense(dtype):
    return (256,), L.Dense(256, "tanh", name="layer", dtype=dtype)


def dense_over_time(dtype):
    return (2, 256), L.Dense(256, "tanh", name="layer", dtype=dtype)


def projection(dtype):
    return (3, 256), L.EinsumDense("abc,cde->abde", (3, 4, 64), bias_axes="de", name="layer", dtype=dtype)


def back_projection(dtype):
    return (3, 16, 16), L.EinsumDense("abcd,cde->abe", (3, 256), name="layer", dtype=dtype)


KINDS = {f.__name__: f for f in (dense, dense_over_time, projection, back_projection)}


def trained(kind, way, layer_rules, dtype="float32"):
    """The weights after a step of plain Keras, or of the part alone; and the way that the table names."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    shape, layer = KINDS[kind](dtype)
    inputs = keras.Input(shape)
    model = keras.Model(inputs, L.Dense(2, name="head", dtype=dtype)(L.Flatten()(layer(inputs))))
    before = values(model)
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(6, *shape)), rng.normal(size=(6, 2))
    mask = MASKS[way].reshape(layer.kernel.shape)
    name, tuning = None, None
    if layer_rules is not None:
        tuning = ft.tune(model, ft.select(model, (layer.kernel, mask)), layer_rules=layer_rules)
        ((*_, name),) = tuning.table().rows
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.train_on_batch(x, y)
    if tuning:
        tuning.finish()
        assert moved_outside(before, values(model), tuning.selection) == {}
    after = values(model)["layer/kernel"]
    return np.asarray(after, np.float64)[mask], np.asarray(before["layer/kernel"], np.float64)[mask], name


@pytest.mark.parametrize(
    ("kind", "way"), cases(KINDS, MASKS, quick=lambda kind, way: way == "sampled" or kind == "dense")
)
def test_a_step_equals_plain_keras(kind, way):
    expected, before, _ = trained(kind, way, None)
    by_rule, _, name = trained(kind, way, True)
    assert name == way
    assert (np.abs(expected - before) > 1e-4).mean() > 0.5
    np.testing.assert_allclose(by_rule, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "way"), cases(["bfloat16", "float16"], MASKS, quick=lambda dtype, way: (dtype, way) in PRECISE)
)
def test_precisions(dtype, way):
    by_rule, before, _ = trained("dense", way, True, dtype)
    composed, _, name = trained("dense", way, False, dtype)
    assert name == "dense"
    check_steps({"kernel": by_rule}, {"kernel": composed}, {"kernel": before}, ["kernel"], 0.05)


def test_what_is_not_a_matrix_product_is_composed():
    inputs = keras.Input((3, 4))
    layer = L.EinsumDense("abc,bcd->abd", (3, 5), name="layer")  # a product for each position
    model = keras.Model(inputs, layer(inputs))
    with ft.tune(model, ft.select(model, (layer.kernel, scattered((3, 4, 5), 7)))) as tuning:
        ((*_, name),) = tuning.table().rows
    assert name == "dense"
