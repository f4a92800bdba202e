"""A branch in a traced function: values and gradients are those of the way that is taken, and cost what it does."""

import re

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

import finetooth as ft
from finetooth.backends import backend

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "jax":
    import jax

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4)).astype("float32")
W = RNG.normal(size=(4, 4)).astype("float32")


def traced_gradients(function, variables, *args):
    """The value and the gradients of a function of tensors, in a function that the backend has traced if it does."""
    if BACKEND == "torch":
        return ft.gradients(lambda: function(*map(ops.convert_to_tensor, args)), variables)
    if BACKEND == "tensorflow":

        @tf.function
        def run(*args):
            with tf.GradientTape() as tape:
                loss = function(*args)
            return loss, tape.gradient(loss, [v.value for v in variables], unconnected_gradients="zero")

        return run(*map(tf.constant, args))

    def loss(values, args):
        with keras.StatelessScope(list(zip(variables, values))):
            return function(*args)

    return jax.jit(jax.value_and_grad(loss))([v.value for v in variables], args)


def numbers(tensors):
    return [np.array(ops.convert_to_numpy(ops.stop_gradient(t))) for t in tensors]


def assert_as_taken(yes, no, variables):
    """Each way, chosen while the function runs, is as that way alone."""
    for taken, way in ((True, yes), (False, no)):
        value, found = traced_gradients(lambda c: backend.branch(c, yes, no), variables, taken)
        wanted, expected = traced_gradients(lambda c, way=way: way(), variables, taken)
        np.testing.assert_allclose(*numbers([value, wanted]), rtol=1e-6)
        for own, other in zip(numbers(found), numbers(expected), strict=True):
            # Sums of many terms, in another order: rounding is by their size.
            np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6 * max(1.0, np.abs(other).max()))


def test_what_both_ways_use_and_what_one_does():
    x, w, b = (keras.Variable(value) for value in (X, W, W[0]))
    yes = lambda: ops.sum(ops.tanh(ops.matmul(x, w)) ** 3)  # noqa: E731
    no = lambda: ops.sum(ops.sin(x) * b)  # noqa: E731
    assert_as_taken(yes, no, [x, w, b])


def test_tensors_of_any_kind_in_any_structure_come_out():
    x = keras.Variable(X)

    def loss(condition):
        found = backend.branch(
            condition,
            lambda: {"a": x * 2, "b": [ops.cast(ops.argmax(x, axis=1), "int32"), ops.zeros((), "bool")]},
            lambda: {"a": ops.exp(x), "b": [ops.zeros((3,), "int32"), ops.ones((), "bool")]},
        )
        assert set(found) == {"a", "b"} and "bool" in str(found["b"][1].dtype)
        return ops.sum(found["a"] ** 2) + ops.cast(ops.sum(found["b"][0]), "float32")

    value, (gradient,) = traced_gradients(loss, [x], True)
    np.testing.assert_allclose(*numbers([value, 4 * ops.sum(X**2) + float(X.argmax(1).sum())]), rtol=1e-6)
    np.testing.assert_allclose(numbers([gradient])[0], 8 * X, rtol=1e-6)
    _, (gradient,) = traced_gradients(loss, [x], False)
    np.testing.assert_allclose(numbers([gradient])[0], 2 * np.exp(2 * X), rtol=1e-5)


def test_a_branch_within_a_branch():
    x = keras.Variable(X)
    for outer, inner, factor in ((True, True, 2.0), (True, False, 3.0), (False, True, 5.0)):

        def loss(a, b):
            within = lambda: backend.branch(b, lambda: ops.sum(x * 2), lambda: ops.sum(x * 3))  # noqa: E731
            return backend.branch(a, within, lambda: ops.sum(x * 5))

        _, (gradient,) = traced_gradients(loss, [x], outer, inner)
        np.testing.assert_array_equal(numbers([gradient])[0], np.full_like(X, factor))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    space=st.integers(1, 3),
    kernel=st.integers(1, 3),
    channels=st.sampled_from([(2, 4, 1), (2, 4, 2), (4, 8, 4)]),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.sampled_from(["same", "valid"]),
)
def test_convolutions(space, kernel, channels, stride, dilation, padding):
    inward, outward, groups = channels
    dilation = 1 if stride > 1 else dilation  # Keras allows one of both
    if BACKEND == "tensorflow":
        groups, dilation = 1, 1  # it has no more of them on a CPU
    rng = np.random.default_rng(0)
    x = keras.Variable(rng.normal(size=(2, *(6, 7, 5)[:space], inward)))
    w = keras.Variable(rng.normal(size=(kernel,) * space + (inward // groups, outward)))

    def yes():
        y = ops.conv(x, w, strides=stride, padding=padding, data_format="channels_last", dilation_rate=dilation)
        return ops.sum(ops.sin(y))

    assert_as_taken(yes, lambda: ops.sum(w**2), [x, w])


if BACKEND == "jax":
    # (samples, space..., channels), (space..., in, out) -> (samples, space..., channels), which XLA has fast code for
    CANONICAL = re.compile(r"b\d*f_\d*io->b\d*f")

    def convolutions(branch):
        """How the axes lie in the convolutions of a compiled step with a branch, its gradients among them."""
        x, w = RNG.normal(size=(2, 8, 8, 3)).astype("float32"), RNG.normal(size=(3, 3, 3, 4)).astype("float32")
        convolve = lambda x, w: ops.conv(x, w, padding="same", data_format="channels_last")  # noqa: E731

        def loss(x, w, condition):
            return ops.sum(branch(condition, lambda: convolve(x, w) ** 2, lambda: ops.ones((2, 8, 8, 4))))

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, w, True).compile().as_text()
        return re.findall(r"dim_labels=(\S+?),? ", compiled)

    def test_gradients_of_convolutions_are_such_as_xla_has_fast_code_for():
        found = convolutions(backend.branch)
        assert len(found) == 3 and all(map(CANONICAL.fullmatch, found))
        assert not all(map(CANONICAL.fullmatch, convolutions(jax.lax.cond)))  # or there is no need for our own

    TRANSFORMED = {
        "grad": lambda f: jax.grad(f, argnums=(0, 1))(X, W),
        "grad of grad": lambda f: jax.grad(lambda x, w: ops.sum(jax.grad(f)(x, w) ** 2), argnums=1)(X, W),
        "vmap": lambda f: jax.vmap(jax.grad(f), (None, 0))(X, np.stack([W, W.T])),
        "jvp of grad": lambda f: jax.jvp(jax.grad(f), (X, W), (X, W)),
    }

    @pytest.mark.parametrize("inside", [jax.checkpoint, jax.jit])
    @pytest.mark.parametrize("name", TRANSFORMED)
    @pytest.mark.parametrize("condition", [True, False])
    def test_what_jax_does_with_functions(name, inside, condition):
        def result(branch):
            def loss(x, w):
                return ops.sum(branch(condition, lambda: ops.tanh(x @ w), lambda: x * 2) ** 3)

            return jax.tree.leaves(jax.jit(lambda: TRANSFORMED[name](inside(loss)))())

        for own, expected in zip(result(backend.branch), result(jax.lax.cond), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-6)
