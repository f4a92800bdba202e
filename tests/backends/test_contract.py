"""Each function of the contract, against NumPy, on the backend in use."""

import keras
import numpy as np
import pytest
from keras import ops

from finetooth.backends import backend, contract
from finetooth.backends.tensor_region import TensorRegion
from finetooth.regions import indexing
from finetooth.regions import region as region_kinds

SHAPE = (5, 4, 3)
INDICES = {
    "whole": np.s_[:],
    "range": np.s_[1:4],
    "range of the last axis": np.s_[..., 1:],
    "indices": np.s_[[0, 3]],
    "indices of an inner axis": np.s_[:, [0, 2]],
    "grid of a range and indices": np.s_[1:4, [0, 2]],
    "grid of indices": np.s_[::2, :, ::2],
    "one element": np.s_[2, 1, 0],
    "points": (np.array([0, 4, 2]), np.array([3, 1, 1]), np.array([0, 2, 2])),
}
regions = pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)


def tensor(value):
    return ops.convert_to_tensor(value)


def array(value):
    return np.asarray(ops.convert_to_numpy(value))


def counting(shape=SHAPE):
    return np.arange(np.prod(shape), dtype="float32").reshape(shape)


def region_of(index, shape=SHAPE):
    return indexing.region_at(shape, index)


def gradient_of(function, value):
    """The gradient of a sum for a variable that holds the value."""
    variable = keras.Variable(value)
    loss, _, gradients = backend.forward_with_gradients(
        lambda: (ops.sum(function(ops.convert_to_tensor(variable))), None), [variable]
    )
    return gradients([0])[0]


def test_every_function_is_there():
    names = {name for part in contract.Backend.__mro__ for name in vars(part) if not name.startswith("_")}
    assert len(names) > 35 and {name for name in names if not callable(getattr(backend, name, None))} == set()


@regions
def test_gather_and_scatter_of_regions(index):
    value, region = counting(), region_of(index)
    there = TensorRegion(region)
    compact = -region.gather(value) - 1
    np.testing.assert_array_equal(array(there.gather(tensor(value))), region.gather(value))
    merged = there.scatter(tensor(value), tensor(compact))
    np.testing.assert_array_equal(array(merged), region.scatter(value, compact))


@regions
def test_the_gradient_of_a_scatter_is_a_gather(index):
    value, region, weights = counting(), region_of(index), counting() ** 2
    there = TensorRegion(region)
    found = gradient_of(lambda part: there.scatter(tensor(value), part) * tensor(weights), region.gather(value))
    np.testing.assert_array_equal(array(found), region.gather(weights))


@regions
def test_read_and_write_of_regions(index):
    value, region = counting(), region_of(index)
    there, variable = TensorRegion(region), keras.Variable(value)
    before = backend.read(variable, there)
    compact = -region.gather(value) - 1
    backend.write(variable, there, tensor(compact))
    np.testing.assert_array_equal(array(before), region.gather(value))  # a write later does not change it
    np.testing.assert_array_equal(array(variable), region.scatter(value, compact))


def test_coordinates_of_elements_beyond_the_range_of_int32():
    """Of a shape of 2**34 elements, which is not allocated."""
    last = 2**34 - 1
    points = TensorRegion(region_kinds.points((2**17, 2**17), [1, last])).points
    found = array(points).T if ops.is_tensor(points) else [array(axis) for axis in points]
    np.testing.assert_array_equal(found, [[0, 2**17 - 1], [1, 2**17 - 1]])


@pytest.mark.parametrize(("turned_a", "turned_b"), [(False, False), (True, False), (False, True)])
def test_products(turned_a, turned_b):
    a, b = counting((4, 5)) / 10, counting((5, 3)) / 10
    given = a.T if turned_a else a, b.T if turned_b else b
    found = backend.matmul(*map(tensor, given), transpose_a=turned_a, transpose_b=turned_b)
    np.testing.assert_allclose(array(found), a @ b, rtol=1e-6)
    np.testing.assert_allclose(array(backend.einsum("ab,bc->ac", tensor(a), tensor(b))), a @ b, rtol=1e-6)
    assert backend.as_matrix(tensor(counting())).shape == (20, 3)


def test_sampled_products():
    a, b = counting((6, 4)) / 10, counting((6, 3)) / 10
    rows, columns = np.array([0, 0, 3]), np.array([0, 2, 1])
    found = backend.sampled_product(backend.samples((4, 3), rows, columns), tensor(a), tensor(b))
    np.testing.assert_allclose(array(found), (a.T @ b)[rows, columns], rtol=1e-5)


def test_gradient_of_a_linear_function():
    x, dy = counting((3, 2)), counting((3, 4))
    matrix = counting((2, 4))
    found = backend.linear_vjp(lambda x: ops.matmul(x, tensor(matrix)), tensor(x), tensor(dy))
    np.testing.assert_allclose(array(found), dy @ matrix.T)


def test_rows_each_once():
    indices, values = np.array([4, 1, 4, 0], "int32"), counting((4, 2))
    rows, sums = map(array, backend.distinct_rows(tensor(indices), tensor(values), 5))
    found = {int(row): tuple(total) for row, total in zip(rows, sums) if row < 5}
    assert found == {0: (6.0, 7.0), 1: (2.0, 3.0), 4: (4.0, 6.0)}


def test_read_and_write_of_rows():
    variable, rows = keras.Variable(counting((5, 2))), tensor(np.array([3, 1]))
    np.testing.assert_array_equal(array(backend.read_rows(variable, rows)), counting((5, 2))[[3, 1]])
    backend.write_rows(variable, rows, tensor(np.array([[1, 2], [3, 4]], "float32")))
    expected = counting((5, 2))
    expected[[3, 1]] = [[1, 2], [3, 4]]
    np.testing.assert_array_equal(array(variable), expected)


def test_masks_and_scales_of_gradients():
    gradient = np.array([[1, np.nan], [np.inf, 4]], "float32")
    mask = np.array([[True], [False]])
    np.testing.assert_array_equal(
        array(backend.mask_gradient(tensor(gradient), tensor(mask))), np.where(mask, gradient, 0)
    )
    np.testing.assert_array_equal(array(backend.scale_gradient(tensor(gradient), tensor(np.float32(2)))), gradient * 2)


@pytest.mark.parametrize("condition", [True, False])
def test_branches(condition):
    truth, value = tensor(condition), np.float32(3)
    assert backend.concrete(truth) is condition
    assert array(backend.branch(truth, lambda: ops.ones(2), lambda: ops.zeros(2))).tolist() == [condition] * 2
    found = gradient_of(lambda x: backend.branch(truth, lambda: x * x, lambda: 5 * x), value)
    assert array(found) == (6 if condition else 5)
    variable = keras.Variable(0.0)
    backend.assign_in_branch(truth, lambda: variable.assign(1.0), lambda: variable.assign(2.0), [variable])
    assert array(variable) == (1 if condition else 2)


def test_gradients_of_a_function_again_and_of_some_sources():
    a, b, other = keras.Variable(2.0), keras.Variable(3.0), keras.Variable(1.0)
    loss, more, gradients = backend.forward_with_gradients(lambda: (a * a * b, "more"), [a, b, other])
    assert array(loss) == 12 and more == "more"
    assert [float(array(g)) for g in gradients([1, 0])] == [4, 12]
    assert [float(array(g)) for g in gradients([0])] == [12]
    (unused,) = gradients([2])
    assert unused is None or array(unused) == 0


def test_kinds_of_variables():
    native = backend.trainable_like(keras.Variable(0.0), tensor(counting((2,))), "part")
    assert isinstance(native, keras.Variable) and native.trainable and array(native).tolist() == [0, 1]
    assert not backend.is_variable(1.0) and not backend.is_array(1.0)
    assert backend.is_array(tensor(counting())) == (keras.backend.backend() == "jax")
    assert backend.sparse_rows(tensor(counting())) is None
    assert backend.single_replica()
