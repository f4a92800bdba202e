"""Part: NumPy's own indexing is what every read and write is compared with, and no other bit may change."""

import gc

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from natives import NATIVE, bare, kinds, numpy_of

import finetooth as ft
from finetooth.regions import bits

UPDATES = {
    "assign": lambda old, new: np.broadcast_to(new, old.shape),
    "assign_add": np.add,
    "assign_sub": np.subtract,
    "assign_mul": np.multiply,
    "assign_min": np.minimum,
    "assign_max": np.maximum,
}
INDICES = [
    np.s_[2],
    np.s_[-1],
    np.s_[1:3],
    np.s_[::2],
    np.s_[::-1],
    np.s_[[4, 0, 2]],
    np.s_[:, 1],
    np.s_[:, 1:3],
    np.s_[:, [3, 0]],
    np.s_[1:4, 1:3],
    np.s_[2, :, 0],
    np.s_[..., 1],
    np.s_[[3, 1], 2:],
    np.s_[[0, 4], :, [1, 0]],
    np.s_[...],
    np.s_[1:1],
]


@pytest.fixture
def x64():
    """Double precision, which JAX has only when asked."""
    if NATIVE != "jax":
        yield
        return
    import jax

    with jax.enable_x64(True):
        yield


def array(shape=(5, 4, 2), dtype="float32", seed=0):
    return np.random.default_rng(seed).normal(scale=10, size=shape).astype(dtype)


def outer(index, shape):
    """The index for NumPy, with lists on several axes as their outer product."""
    if not isinstance(index, tuple) or sum(isinstance(entry, list) for entry in index) < 2:
        return index
    full = [range(n)[entry] if isinstance(entry, slice) else entry for entry, n in zip(index, shape)]
    return np.ix_(*full)


@pytest.mark.parametrize("kind", kinds)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_reads_and_writes_are_numpys(kind, index):
    start = array()
    variable = kind(start)
    part = ft.Part(variable, index)
    where = outer(index, start.shape)
    assert part.shape == start[where].shape
    np.testing.assert_array_equal(numpy_of(part.read()), start[where])
    expected = start.copy()
    for seed, (name, update) in enumerate(UPDATES.items()):
        new = array(start[where].shape, seed=seed + 1)
        expected[where] = update(expected[where], new)
        variable = getattr(part, name)(new)
        part = ft.Part(variable, index)  # a new array, on JAX
        assert not bits.differing(numpy_of(variable), expected).any(), name


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_mask_any_broadcast(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))))
    mask = mask.reshape(shape)
    start = array(shape)
    variable = keras.Variable(start)
    part = ft.Part(variable, mask)
    np.testing.assert_array_equal(numpy_of(part.read()), start[mask])
    new = data.draw(st.sampled_from([2.5, np.float32(3), np.ones(1, "float32"), array((int(mask.sum()),), seed=3)]))
    part.assign(new)
    start[mask] = new
    assert not bits.differing(numpy_of(variable), start).any()


@pytest.mark.parametrize(
    "value", [7, [1, 2], [[1], [2], [3]], np.ones((1, 1, 3, 2)), np.arange(6).reshape(3, 2)], ids=str
)
def test_values_broadcast_as_in_numpy(value):
    start = array((4, 3, 2))
    variable = keras.Variable(start)
    ft.Part(variable, np.s_[1]).assign(value)
    start[1] = value
    np.testing.assert_array_equal(numpy_of(variable), start)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "int8", "bool"])
def test_dtypes(dtype):
    if dtype == "float64" and keras.backend.backend() == "jax":
        dtype = "int16"  # JAX has none unless asked
    start = np.arange(20).reshape(5, 4) % 2 if dtype == "bool" else np.arange(20).reshape(5, 4)
    for index in (np.s_[1:3], np.s_[[0, 3]], np.s_[:, [0, 2, 3]], start % 3 == 0):
        variable = keras.Variable(start, dtype=dtype, trainable=False)
        before = numpy_of(variable)
        ft.Part(variable, index).assign(True)
        before[index] = 1
        assert not bits.differing(numpy_of(variable), before).any()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_are_read_and_written_and_not_trained(dtype):
    if dtype == "complex128" and keras.backend.backend() == "jax":
        dtype = "complex64"  # JAX has no other unless asked
    start = (array((5, 4)) + 1j * array((5, 4), seed=1)).astype(dtype)
    for index in (np.s_[2], np.s_[1:3, 1:], np.s_[[0, 3]], np.s_[:, [3, 0]], start.real > 0, np.s_[...]):
        variable, expected = keras.Variable(start, dtype=dtype, trainable=False), start.copy()
        part = ft.Part(variable, index)
        np.testing.assert_array_equal(numpy_of(part.read()), start[index])
        for name in ("assign", "assign_add", "assign_sub"):
            new = (array(start[index].shape, seed=2) - 2j).astype(dtype)
            getattr(part, name)(new)
            expected[index] = UPDATES[name](expected[index], new)
            assert not bits.differing(numpy_of(variable), expected).any(), name
        part.assign_mul(2j)
        expected[index] *= 2j
        np.testing.assert_allclose(numpy_of(variable), expected, rtol=1e-6)
        for act in (part.assign_min, part.assign_max):
            with pytest.raises(ft.PartError, match="larger"):
                act(1)
        with pytest.raises(ft.PartError, match="gradients do not train"):
            part.variable  # noqa: B018


def test_double_precision_is_trained_in_double_precision(x64):
    """A part of a float64 variable is float64: a step of 1e-12 arrives."""
    variable = keras.Variable(np.ones((3, 2)), dtype="float64")
    part = ft.Part(variable, np.s_[1])
    assert keras.backend.standardize_dtype(part.variable.dtype) == "float64"
    keras.optimizers.SGD(1e-12).apply([keras.ops.ones((2,), "float64")], [part.variable])
    part.assign(part.variable)
    np.testing.assert_array_equal(numpy_of(variable), [[1, 1], [1 - 1e-12] * 2, [1, 1]])
    optimizer = ft.SelectiveOptimizer(keras.optimizers.SGD(1e-12), [(variable, np.s_[2])])
    optimizer.apply([keras.ops.ones((3, 2), "float64")], [variable])
    np.testing.assert_array_equal(numpy_of(variable), [[1, 1], [1 - 1e-12] * 2, [1 - 1e-12] * 2])


def test_text_and_regions_address_too():
    start = array((5, 4))
    variable = keras.Variable(start)
    np.testing.assert_array_equal(numpy_of(ft.Part(variable, "[[3,1], 1:3]").read()), start[[3, 1], 1:3])
    np.testing.assert_array_equal(numpy_of(ft.Part(variable, ft.Points((5, 4), [19, 2])).read()), start.flat[[2, 19]])


@pytest.mark.parametrize("kind", kinds)
def test_what_was_read_stays_as_it_was(kind):
    start = array((5, 4))
    variable = kind(start)
    part = ft.Part(variable, np.s_[1:3])
    read = part.read()
    part.assign(0)
    np.testing.assert_array_equal(numpy_of(read), start[1:3])


@pytest.mark.parametrize("index", [np.s_[:, 1], np.s_[[3, 0]], np.s_[1:3, 1:], np.eye(5, 4, dtype=bool)], ids=str)
def test_the_small_variable_trains_alone(index):
    start, x = array((5, 4)), array((3, 5), seed=1)
    variable = keras.Variable(start)
    part = ft.Part(variable, index)
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.1)
    plain = keras.Variable(start)

    loss, gradient = ft.gradients(lambda: keras.ops.sum(keras.ops.matmul(x, part.merged()) ** 2), part)
    full_loss, full = ft.gradients(lambda: keras.ops.sum(keras.ops.matmul(x, plain) ** 2), plain)
    np.testing.assert_allclose(numpy_of(loss), numpy_of(full_loss), rtol=1e-6)
    np.testing.assert_allclose(numpy_of(gradient), numpy_of(full)[index], rtol=1e-5)

    optimizer.apply([gradient], [part.variable])
    assert not bits.differing(numpy_of(variable), start).any()
    part.assign(part.variable)
    changed = bits.differing(numpy_of(variable), start)
    inside = np.zeros((5, 4), bool)
    inside[index] = True
    np.testing.assert_array_equal(changed, inside)
    np.testing.assert_array_equal(numpy_of(part.read()), numpy_of(part.variable))


def test_an_assignment_reaches_the_small_variable():
    variable = keras.Variable(array((5, 4)))
    part = ft.Part(variable, np.s_[1])
    assert part.variable.shape == (4,)
    part.assign([1, 2, 3, 4])
    np.testing.assert_array_equal(numpy_of(part.variable), [1, 2, 3, 4])
    np.testing.assert_array_equal(numpy_of(part.merged())[1], [1, 2, 3, 4])


def test_low_precision_has_a_wide_part():
    variable = keras.Variable(array((5, 4)), dtype="bfloat16")
    part = ft.Part(variable, np.s_[1])
    assert keras.backend.standardize_dtype(part.variable.dtype) == "float32"
    assert keras.backend.standardize_dtype(part.merged().dtype) == "bfloat16"


def test_small_steps_arrive_though_each_is_written():
    variable = keras.Variable(np.ones((3, 2)), dtype="bfloat16")
    part = ft.Part(variable, np.s_[1])
    for _ in range(100):
        part.variable.assign_sub(keras.ops.full((2,), 1e-4))  # each alone is rounded away
        part.assign(part.variable)
    np.testing.assert_allclose(numpy_of(variable).astype("float32"), [[1, 1], [0.99, 0.99], [1, 1]], atol=4e-3)
    assert (numpy_of(variable)[1] != 1).all()


BAD = {
    "shape": (lambda v: ft.Part(v, np.s_[1]).assign([1, 2, 3]), "do not broadcast"),
    "too many axes": (lambda v: ft.Part(v, np.s_[1]).assign(np.ones((2, 4))), "do not broadcast"),
    "no numbers": (lambda v: ft.Part(v, np.s_[1]).assign(None), "expected numbers"),
    "out of range": (lambda v: ft.Part(v, np.s_[5]).assign(0), "out of range"),
    "far out of range": (lambda v: ft.Part(v, np.s_[[2**40]]).assign(0), "out of range"),
    "negative out of range": (lambda v: ft.Part(v, np.s_[-6]).assign(0), "out of range"),
    "twice": (lambda v: ft.Part(v, np.s_[[1, 2, 1]]).assign(0), "more than once"),
    "twice, from both ends": (lambda v: ft.Part(v, np.s_[[1, -4]]).assign(0), "more than once"),
    "mask": (lambda v: ft.Part(v, np.ones((4, 5), bool)).assign(0), "does not fit"),
    "text": (lambda v: ft.Part(v, "[1").assign(0), "Expected"),
    "region": (lambda v: ft.Part(v, ft.Whole((4, 5))).assign(0), "belongs to shape"),
    "part of a part": (lambda v: ft.Part(ft.Part(v, np.s_[1]), np.s_[0]), "part of a part"),
    "part of its variable": (lambda v: ft.Part(ft.Part(v, np.s_[1]).variable, np.s_[0]), "part of a part"),
    "complex": (lambda v: ft.Part(v, np.s_[1]).assign(np.ones(4, complex)), "without loss"),
}


@pytest.mark.parametrize("kind", kinds)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_error_and_nothing_is_written(kind, case):
    start = array((5, 4))
    variable = kind(start)
    act, message = BAD[case]
    with pytest.raises(ft.FinetoothError, match=message):
        act(variable)
    assert not bits.differing(numpy_of(variable), start).any()


def test_integers_take_no_fractions_and_are_not_trained():
    variable = keras.Variable(np.arange(6).reshape(3, 2), dtype="int32", trainable=False)
    part = ft.Part(variable, np.s_[1])
    with pytest.raises(ft.PartError, match="without loss"):
        part.assign_add(0.5)
    with pytest.raises(ft.PartError, match="gradients do not train"):
        part.variable  # noqa: B018
    np.testing.assert_array_equal(numpy_of(variable), np.arange(6).reshape(3, 2))
    part.assign_add(5)
    np.testing.assert_array_equal(numpy_of(variable)[1], [7, 8])


def test_what_is_not_trainable_can_be_written_but_not_trained():
    variable = keras.Variable(array((5, 4)), trainable=False)
    part = ft.Part(variable, np.s_[1])
    with pytest.raises(ft.PartError, match="not trainable"):
        part.merged()
    part.assign(1)
    np.testing.assert_array_equal(numpy_of(part.read()), np.ones(4))


def test_what_is_no_variable_of_this_backend():
    for other in (np.ones((5, 4)), [1, 2], "kernel", keras.layers.Dense(2)):
        with pytest.raises(ft.PartError, match="Expected a keras.Variable"):
            ft.Part(other, np.s_[0])


@pytest.mark.parametrize("kind", kinds)
def test_a_part_holds_its_variable(kind):
    """As a view of NumPy holds its array, whoever else has held the variable and let go of it."""
    variable = kind(array((5, 4)))
    parts = [ft.Part(kind(array((5, 4))), np.s_[0]), ft.Part(variable, np.s_[0])]
    assert parts[1].base is variable
    del variable
    gc.collect()
    for part in parts:
        np.testing.assert_array_equal(numpy_of(ft.Part(part.assign(1), np.s_[0]).read()), np.ones(4))


def test_a_variable_that_is_being_tuned():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="a")])
    kernel = model.get_layer("a").kernel
    part = ft.Part(kernel, np.s_[0])
    with ft.tune(model, "a/kernel[1]"):
        with pytest.raises(ft.PartError, match="being tuned"):
            part.assign(0)
        with pytest.raises(ft.PartError, match="being tuned"):
            ft.Part(kernel, np.s_[2])
    part.assign(0)
    assert (numpy_of(kernel)[0] == 0).all()


def test_bare_variables_of_the_backend(backend):
    assert backend == keras.backend.backend() and NATIVE == backend
    variable = bare(array((5, 4)))
    part = ft.Part(variable, np.s_[:, 1])
    assert "Part" in repr(part) and "5 elements" in repr(part)
    small = part.variable
    assert isinstance(small, keras.Variable) if backend == "jax" else isinstance(small, type(variable))
