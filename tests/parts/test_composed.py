"""A tuned variable reads as base and part, however it is read, and is of its own class again afterwards."""

import keras
import numpy as np
from helpers import values

import finetooth as ft
from finetooth.parts.composed import Composed, base_only

READERS = {
    "value": lambda v: keras.ops.convert_to_numpy(v.value),
    "numpy": lambda v: v.numpy(),
    "array": lambda v: np.asarray(v),
    "tensor": lambda v: keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(v)),
    "operator": lambda v: keras.ops.convert_to_numpy(v + 0.0),
    "reflected": lambda v: keras.ops.convert_to_numpy(1.0 * v),
    "index": lambda v: keras.ops.convert_to_numpy(v[:]),
    "operation": lambda v: keras.ops.convert_to_numpy(keras.ops.add(v, 0.0)),
    "product": lambda v: keras.ops.convert_to_numpy(keras.ops.matmul(np.eye(3, dtype="float32"), v)),
    "backend": lambda v: keras.ops.convert_to_numpy(keras.ops.multiply(keras.ops.ones(()), v)),
}


def tuned():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="d")])
    return model, ft.tune(model, "d/kernel[:, :2]")


def test_every_way_to_read_a_variable_reads_the_part():
    model, tuning = tuned()
    kernel = model.get_layer("d").kernel
    part = next(v for v in model.trainable_variables if v is not kernel)
    expected = values(model)["d/kernel"].copy()
    expected[:, :2] = np.arange(6).reshape(3, 2)
    part.assign(expected[:, :2])
    for name, read in READERS.items():
        np.testing.assert_array_equal(read(kernel), expected, err_msg=name)
    kernel.assign(expected * 2)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(part), expected[:, :2] * 2)
    tuning.finish()
    for name, read in READERS.items():
        np.testing.assert_array_equal(read(kernel), expected * 2, err_msg=name)


def test_the_class_says_so_and_comes_back():
    model, tuning = tuned()
    layer, before = model.get_layer("d"), type(keras.Variable(0.0))
    assert isinstance(layer.kernel, Composed) and not isinstance(layer.bias, Composed)
    assert type(layer.kernel).__name__ == f"ComposedKept{before.__name__}" and isinstance(layer.kernel, before)
    with base_only():
        assert layer.kernel.shape == (3, 4)
    tuning.revert()
    assert type(layer.kernel) is before and type(layer.bias) is before
