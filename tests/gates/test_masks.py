"""Keras masks and gates: a gated layer sees the masks of its inputs, and hands on those of its outputs."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import finetooth as ft
from finetooth.keras_internals.masks import keeping_mask, mask_of, with_mask

pytestmark = pytest.mark.filterwarnings("ignore:.*does not support masking")  # Keras, of the plain layers too

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "jax":
    import jax

TOKENS = np.array([[1, 2, 0, 0], [3, 4, 5, 0], [2, 0, 0, 0]])
OPEN = np.array([False, True, False])


def numbers(tensor):
    return np.array(ops.convert_to_numpy(ops.stop_gradient(tensor)))


def traced(model, *inputs):
    """The outputs of a call in training that the backend has compiled, with the condition among the inputs."""
    inputs = [ops.convert_to_tensor(x) for x in inputs]
    if BACKEND == "tensorflow":
        return tf.function(lambda *inputs: model(list(inputs), training=True))(*inputs)
    if BACKEND == "jax":
        state = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]
        return jax.jit(lambda state, inputs: model.stateless_call(*state, inputs, training=True)[0])(state, inputs)
    return model(inputs, training=True)


@keras.saving.register_keras_serializable("finetooth tests")
class Recurrent(keras.Model):
    """A model whose call takes no mask: the tensor itself carries it inwards."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gru = layers.GRU(2)
        self.supports_masking = True

    def call(self, x):
        return self.gru(x)


def counted_sum(x, mask):
    return ops.sum(x if mask is None else x * ops.cast(mask, x.dtype)[..., None], axis=1)


class Attending(keras.Layer):
    """Takes two tensors, and the mask of each."""

    def build(self, *shapes):
        self.w = self.add_weight((3,), initializer="ones")

    def call(self, query, value, query_mask=None, value_mask=None):
        return (counted_sum(query, query_mask) - 2 * counted_sum(value, value_mask)) * self.w


class Nested(keras.Layer):
    """Takes a list of two tensors, and a list of masks."""

    def build(self, shapes):
        self.w = self.add_weight((3,), initializer="ones")

    def call(self, xs, mask=None):
        return sum(counted_sum(*pair) for pair in zip(xs, mask or [None, None])) * self.w


class TimeMean(keras.Layer):
    """The mean over the tokens that count: 0/0 where none does."""

    def build(self, shape):
        self.w = self.add_weight((shape[-1],), initializer="ones")

    def call(self, x, mask=None):
        counted = ops.cast(mask, x.dtype)[..., None]
        return ops.sum(x * self.w * counted, axis=1) / ops.sum(counted, axis=1)


def inside(*inner):
    return keras.Sequential([keras.Input((4, 3)), *inner])


# What the gated layer is, what follows it, and how it is called
LAYERS = {
    "gru": (lambda: layers.GRU(2), None),
    "no mask taken": (lambda: layers.Dropout(0.0), lambda: layers.GRU(2)),
    "dense, then lstm": (lambda: layers.Dense(3), lambda: layers.LSTM(2)),
    "bidirectional": (lambda: layers.Bidirectional(layers.GRU(2, return_sequences=True)), lambda: layers.GRU(2)),
    "sequential": (lambda: inside(layers.Dense(3), layers.GRU(2)), None),
    "subclass": (Recurrent, None),
    "two inputs": (Attending, None),
    "a list": (Nested, None),
    "a gate": (lambda: ft.Gate(layers.GRU(2), when=ft.Schedule(), closed="stop", name="inner"), None),
    "mask made inside": (lambda: inside(layers.Masking(), layers.Dense(3)), lambda: layers.GRU(2)),
}


@pytest.mark.parametrize("closed", ["stop", "frozen"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_gate_with_a_condition_per_example_sees_masks(kind, closed):
    make, above = LAYERS[kind]
    layer, above = make(), above() if above else lambda x: x
    tokens, keep = keras.Input((4,), dtype="int32"), keras.Input((), dtype="bool")
    hidden = layers.Embedding(6, 3, mask_zero=kind != "mask made inside")(tokens)
    if kind == "mask made inside":
        hidden = hidden * ops.cast(ops.not_equal(tokens, 0), "float32")[..., None]
    other = layers.Embedding(6, 3, mask_zero=True)(ops.flip(tokens, 1))
    args = {"two inputs": (hidden, other), "a list": ([hidden, other],)}.get(kind, (hidden,))
    expected = numbers(keras.Model([tokens, keep], above(layer(*args)))([TOKENS, OPEN], training=True))
    if kind == "a gate":
        gate = ft.Gate(keras.Sequential([keras.Input((4, 3)), layer]), closed=closed)
    else:
        gate = ft.Gate(layer, closed=closed)
    gated = keras.Model([tokens, keep], above(gate(*args, when=keep)))
    for found in (gated([TOKENS, OPEN], training=True), traced(gated, TOKENS, OPEN)):
        np.testing.assert_allclose(numbers(found), expected, atol=1e-6)


@pytest.mark.parametrize("closed", ["stop", "frozen", "skip"])
@pytest.mark.parametrize("opened", [True, False])
def test_masks_made_inside_of_a_gate_come_out_of_a_branch(closed, opened):
    """The condition is a tensor, so that both ways are traced."""
    tokens, keep = keras.Input((4,), dtype="int32"), keras.Input((), batch_size=1, dtype="bool")
    hidden = layers.Embedding(6, 3, mask_zero=closed == "skip")(tokens)
    if closed != "skip":
        hidden = hidden * ops.cast(ops.not_equal(tokens, 0), "float32")[..., None]
    block, gru = inside(layers.Masking(-1.0 if closed == "skip" else 0.0), layers.Dense(3)), layers.GRU(2)
    plain = gru(block(hidden)) if opened or closed != "skip" else gru(hidden)
    expected = numbers(keras.Model([tokens, keep], plain)([TOKENS, np.array([opened])], training=True))
    gated = keras.Model([tokens, keep], gru(ft.Gate(block, closed=closed)(hidden, when=keep[0])))
    for found in (gated([TOKENS, np.array([opened])], training=True), traced(gated, TOKENS, np.array([opened]))):
        np.testing.assert_allclose(numbers(found), expected, atol=1e-6)


def test_a_closed_example_without_a_token_gives_no_nan():
    hidden, mask = np.ones((3, 4, 3), "float32"), TOKENS != 0
    mask[0] = False
    layer = TimeMean()
    layer.build((None, 4, 3))

    def loss():
        x = with_mask(ops.convert_to_tensor(hidden), ops.convert_to_tensor(mask))
        return ops.sum(ft.gate(layer, x, when=OPEN, closed="stop")[1:])

    _, (gradient,) = ft.gradients(loss, [layer.w])
    np.testing.assert_allclose(numbers(gradient), np.ones(3))


def test_a_mask_is_read_attached_and_kept():
    y = layers.Embedding(3, 2, mask_zero=True)(ops.array([[0, 1]]))
    assert numbers(mask_of(y)).tolist() == [[False, True]]
    assert mask_of(ops.stop_gradient(y * 2)) is None
    other = keeping_mask(lambda y: y * 2, y)
    np.testing.assert_array_equal(numbers(layers.GlobalAveragePooling1D()(other)), 2 * numbers(y)[:, 1])
    assert mask_of(with_mask(ops.ones((1, 2)), None)) is None
