"""One forward pass, the gradients of any subset: compared with derivatives worked out by hand."""

import keras
import numpy as np
import pytest
from natives import NATIVE, bare, kinds, numpy_of

import finetooth as ft

X = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
W = np.random.default_rng(1).normal(size=(4, 3)).astype("float32")
B = np.random.default_rng(2).normal(size=3).astype("float32")


def kinds_with_gradients():
    return [keras.Variable] if NATIVE == "jax" else kinds


def by_hand():
    """The gradients of sum((XW + B)^2)."""
    residual = 2 * (X @ W + B)
    return X.T @ residual, residual.sum(axis=0)


@pytest.mark.parametrize("kind", kinds_with_gradients())
def test_several_subsets_of_one_pass(kind):
    w, b, other = kind(W), kind(B), kind(B)
    column, corner = ft.Part(w, np.s_[:, 1]), ft.Part(w, np.s_[[2, 0], 1:])
    runs = []

    def loss():
        runs.append(1)
        y = keras.ops.matmul(X, keras.ops.convert_to_tensor(w)) + keras.ops.convert_to_tensor(b)
        return keras.ops.sum(y**2), y

    run = ft.Pass(loss, [w, b, column, corner, other])
    dw, db = by_hand()
    np.testing.assert_allclose(numpy_of(run.loss), ((X @ W + B) ** 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(numpy_of(run.outputs), X @ W + B, rtol=1e-5)
    np.testing.assert_allclose(numpy_of(run.gradients(w)), dw, rtol=1e-4)
    named = run.gradients({"b": b, "column": column})
    np.testing.assert_allclose(numpy_of(named["b"]), db, rtol=1e-4)
    np.testing.assert_allclose(numpy_of(named["column"]), dw[:, 1], rtol=1e-4)
    of_corner, unconnected = run.gradients([corner, other])
    np.testing.assert_allclose(numpy_of(of_corner), dw[np.ix_([2, 0], [1, 2])], rtol=1e-4)
    np.testing.assert_array_equal(numpy_of(unconnected), np.zeros(3))
    assert len(runs) == 1


@pytest.mark.parametrize("kind", kinds_with_gradients())
def test_a_part_that_is_read_merged(kind):
    w, b = kind(W), kind(B)
    part = ft.Part(w, np.s_[[2, 0], 1:])
    loss, (of_part, db, of_whole) = ft.gradients(
        lambda: keras.ops.sum((keras.ops.matmul(X, part.merged()) + keras.ops.convert_to_tensor(b)) ** 2), [part, b, w]
    )
    np.testing.assert_allclose(numpy_of(of_part), by_hand()[0][np.ix_([2, 0], [1, 2])], rtol=1e-4)
    np.testing.assert_allclose(numpy_of(db), by_hand()[1], rtol=1e-4)
    np.testing.assert_array_equal(numpy_of(of_whole), np.zeros((4, 3)))  # frozen, in this reading


def test_rows_of_a_table_that_repeat_are_summed():
    table = keras.Variable(np.ones((5, 2), "float32"))
    rows = ft.Part(table, np.s_[[3, 1]])
    tokens = np.array([1, 1, 4, 3, 1])
    scales = np.arange(1, 6, dtype="float32")[:, None]
    _, gradient = ft.gradients(
        lambda: keras.ops.sum(keras.ops.multiply(keras.ops.take(table, tokens, axis=0), scales)), rows
    )
    np.testing.assert_allclose(numpy_of(gradient), [[4, 4], [1 + 2 + 5] * 2])


def test_what_a_layer_assigns_is_kept_and_no_more():
    layer = keras.layers.BatchNormalization()
    layer.build((None, 4))
    _, gradient = ft.gradients(lambda: keras.ops.sum(keras.ops.multiply(layer(X, training=True), X)), layer.gamma)
    assert numpy_of(gradient).shape == (4,)
    np.testing.assert_allclose(numpy_of(layer.moving_mean), 0.01 * X.mean(axis=0), rtol=1e-3, atol=1e-6)


def test_bad_input():
    w = keras.Variable(W)
    run = ft.Pass(lambda: keras.ops.sum(w.value), w)
    cases = {
        "scalar loss": lambda: ft.gradients(lambda: w * 2, w),
        "not among": lambda: run.gradients(keras.Variable(B)),
        "not trainable": lambda: ft.gradients(lambda: keras.ops.sum(w), keras.Variable(B, trainable=False)),
        "do not train": lambda: ft.gradients(
            lambda: keras.ops.sum(w), keras.Variable([1], dtype="int32", trainable=NATIVE != "torch")
        ),
        "Expected a variable": lambda: ft.gradients(lambda: keras.ops.sum(w), "w"),
    }
    if NATIVE == "jax":
        cases["no gradient of its own"] = lambda: ft.gradients(lambda: keras.ops.sum(w), bare(W))
    for message, act in cases.items():
        with pytest.raises(ft.PartError, match=message):
            act()
