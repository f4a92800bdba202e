"""Bits are compared as bits, and a fingerprint sees any one of them move."""

import keras
import ml_dtypes
import numpy as np
import pytest

import finetooth as ft
from finetooth.keras_internals.weights import to_numpy
from finetooth.regions.bits import Fingerprint, as_bits, differing
from finetooth.regions.indexing import region_at
from finetooth.regions.region import Points, Whole, empty

DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def step(array: np.ndarray, flat_indices: int | np.ndarray) -> None:
    """Move elements by one unit in the last place; of a complex number the imaginary part."""
    words = array.reshape(-1).view(f"u{min(array.dtype.itemsize, 8)}").reshape(array.size, -1)
    words[flat_indices, -1] += 1


def next_up(array: np.ndarray, flat_index: int) -> np.ndarray:
    """A copy with one element moved by one unit in the last place."""
    moved = np.array(array, order="C")
    step(moved, flat_index)
    return moved


@pytest.mark.parametrize("name", DTYPES)
def test_minus_zero_and_nan_compare_as_what_they_are(name):
    dtype = dtype_of(name)
    zeros = np.array([0.0, 0.0, 1.0], dtype)
    assert differing(zeros, np.array([0.0, -0.0, 1.0], dtype)).tolist() == [False, True, False]
    nans = np.array([np.nan, 1.0], dtype)
    assert not differing(nans, nans.copy()).any()
    assert differing(nans, next_up(nans, 0)).tolist() == [True, False]
    if "complex" in name:
        signed = np.array([complex(0.0, -0.0), complex(-0.0, 0.0), complex(1.0, np.nan)], dtype)
        assert differing(np.array([0, 0, complex(1.0, np.nan)], dtype), signed).tolist() == [True, True, False]


@pytest.mark.parametrize("name", DTYPES)
def test_bits_have_the_shape_of_the_array_whatever_its_layout(name, rng):
    array = rng.normal(size=(3, 4)).astype(dtype_of(name))
    assert as_bits(array).shape == (3, 4) and as_bits(array).dtype.kind == ("V" if name == "complex128" else "u")
    np.testing.assert_array_equal(as_bits(array.T), as_bits(array).T)
    np.testing.assert_array_equal(as_bits(array[::2, ::-1]), as_bits(array)[::2, ::-1])
    assert as_bits(array[0, 0]).shape == () and as_bits(np.zeros((0, 3), array.dtype)).shape == (0, 3)
    np.testing.assert_array_equal(as_bits(array).view(array.dtype), array)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "int8"])
def test_a_variable_is_read_in_its_own_dtype(name):
    values = np.array([[0.0, 1.0], [-2.0, 3.0]])
    variable = keras.Variable(values, dtype=name, trainable=False)
    assert to_numpy(variable).dtype == dtype_of(name)
    np.testing.assert_array_equal(to_numpy(variable), values.astype(dtype_of(name)))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 2)])
def test_a_fingerprint_sees_one_unit_in_the_last_place_of_any_element(name, shape, rng):
    array = rng.normal(size=shape).astype(dtype_of(name))
    before = Fingerprint.of(array, empty(shape))
    assert before.moved(Fingerprint.of(array.copy(), empty(shape))) == 0
    for index in range(array.size):
        assert before.moved(Fingerprint.of(next_up(array, index), empty(shape))) == 1


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(
    "region",
    [
        region_at((4, 6), np.s_[1:3]),
        region_at((4, 6), np.s_[:, [0, 1, 5]]),
        region_at((4, 6), np.s_[::3, ::2]),
        Points((4, 6), [0, 7, 8, 23]),
        Whole((4, 6)),
        empty((4, 6)),
    ],
    ids=lambda region: region.text(),
)
def test_a_fingerprint_sees_what_is_outside_the_region_and_nothing_inside(name, region, rng):
    array = rng.normal(size=(4, 6)).astype(dtype_of(name))
    before, inside = Fingerprint.of(array, region), region.mask().reshape(-1)
    for index in range(array.size):
        assert before.moved(Fingerprint.of(next_up(array, index), region)) == (0 if inside[index] else 1)
    everything = -array - 1
    assert before.moved(Fingerprint.of(region.scatter(array, region.gather(everything)), region)) == 0


@pytest.mark.parametrize("name", DTYPES)
def test_moved_counts_the_elements_that_moved(name, rng):
    array = rng.normal(size=(20, 30)).astype(dtype_of(name))
    before = Fingerprint.of(array, region_at((20, 30), np.s_[0]))
    for count in (1, 2, 57, 570):
        moved = array.copy()
        chosen = 30 + rng.choice(570, count, replace=False)
        step(moved, chosen)
        moved[0] = 0
        after = Fingerprint.of(moved, region_at((20, 30), np.s_[0]))
        assert before.moved(after) == after.moved(before) == count


def test_a_change_that_keeps_every_byte_sum_is_still_seen():
    a, b = np.array([0x0102], np.uint16).view(np.float16), np.array([0x0201], np.uint16).view(np.float16)
    assert Fingerprint.of(a, empty((1,))).moved(Fingerprint.of(b, empty((1,)))) == 1


def test_signs_of_zero_nan_payloads_and_carries_are_seen():
    array = np.array([0.0, np.nan, np.float32(np.inf), 1.0], np.float32)
    before = Fingerprint.of(array, empty((4,)))
    for index, value in ((0, -0.0), (1, -np.nan), (2, -np.inf)):
        moved = array.copy()
        moved[index] = value
        assert before.moved(Fingerprint.of(moved, empty((4,)))) == 1
    carry = np.array([0x3FFFFFFF, 0x000000FF, 0x0000FFFF, 0x00FFFFFF], np.uint32).view(np.float32)
    for index in range(4):
        assert Fingerprint.of(carry, empty((4,))).moved(Fingerprint.of(next_up(carry, index), empty((4,)))) == 1


def test_a_fingerprint_does_not_depend_on_memory_layout_and_leaves_the_array_alone(rng):
    array = rng.normal(size=(5, 7)).astype(np.float32)
    before = array.copy()
    for region in (region_at((5, 7), np.s_[:, 2]), Points((5, 7), [3, 4, 30]), empty((5, 7))):
        first, second = Fingerprint.of(array, region), Fingerprint.of(np.asfortranarray(array), region)
        assert first.digest == second.digest and first.moved(second) == 0
    np.testing.assert_array_equal(array, before)


def test_nothing_has_a_fingerprint_too():
    nothing = np.zeros((0, 3), np.float32)
    assert Fingerprint.of(nothing, empty((0, 3))).moved(Fingerprint.of(nothing, Whole((0, 3)))) == 0


def test_complex_statistics_of_a_tuned_model_are_watched():
    dtype = "complex64" if keras.backend.backend() == "jax" else "complex128"  # which JAX has off

    class Turning(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(4,), initializer="ones", name="kernel")
            self.turn = self.add_weight(shape=(4,), dtype=dtype, initializer="ones", trainable=False, name="turn")

        def call(self, x):
            return x * self.kernel * keras.ops.cast(keras.ops.real(keras.ops.convert_to_tensor(self.turn)), x.dtype)

    layer = Turning(name="layer")
    model = keras.Sequential([keras.Input((4,)), layer])
    with ft.tune(model, "layer/kernel[:2]") as tuning:
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(np.ones((4, 4)), np.zeros((4, 4)), verbose=0)
        assert tuning.verify() and tuning.patch["layer/kernel"].moved == 2
        layer.turn.assign(np.array([1, 1, 1 + 1e-30j, 1], dtype))
        assert not tuning.verify()
    with pytest.raises(ft.SelectionError, match="gradients do not train"):
        ft.select(model, "layer/turn")
