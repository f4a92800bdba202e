"""Variables of the backend itself, for tests that are the same on every backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

NATIVE = keras.backend.backend()


def bare(value: np.ndarray) -> Any:
    """A variable of the backend itself that can be trained; on JAX an array."""
    if NATIVE == "tensorflow":
        import tensorflow as tf

        return tf.Variable(value)
    if NATIVE == "torch":
        import torch

        return torch.nn.Parameter(keras.ops.convert_to_tensor(value).detach().clone())
    return keras.ops.convert_to_tensor(value)


kinds = [keras.Variable, bare]


def numpy_of(value: Any) -> np.ndarray:
    """A copy, whatever it is a value of."""
    value = value.value if isinstance(value, keras.Variable) else value
    value = value.detach() if NATIVE == "torch" and hasattr(value, "detach") else value
    return np.array(keras.ops.convert_to_numpy(value))


def gradients_of(model: keras.Model, loss: Any) -> Any:
    """A function of a batch that gives the gradients of plain autodiff for the model's trainable variables.

    The loss is `loss(y, prediction)` and what the layers add.
    """
    if NATIVE == "jax":
        import jax

        def of_values(values: Any, x: Any, y: Any) -> Any:
            states = [variable.value for variable in model.non_trainable_variables]
            prediction, _, added = model.stateless_call(values, states, x, training=True, return_losses=True)
            return loss(y, prediction) + sum(added)

        compiled = jax.jit(jax.grad(of_values))
        return lambda x, y: compiled([variable.value for variable in model.trainable_variables], x, y)
    if NATIVE == "torch":
        import torch

        def by_torch(x: Any, y: Any) -> Any:
            total = loss(y, model(x, training=True)) + sum(model.losses)
            return torch.autograd.grad(total, [variable.value for variable in model.trainable_variables])

        return by_torch
    import tensorflow as tf

    def by_tape(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            total = loss(y, model(x, training=True)) + sum(model.losses)
        found = tape.gradient(total, [variable.value for variable in model.trainable_variables])
        return [tf.convert_to_tensor(gradient) for gradient in found]

    return by_tape


def sparse(indices: Any, values: np.ndarray, shape: tuple[int, ...]) -> Any:
    """A sparse gradient of rows, which may repeat."""
    indices, values = np.asarray(indices), keras.ops.convert_to_tensor(values)
    if NATIVE == "tensorflow":
        import tensorflow as tf

        return tf.IndexedSlices(values, tf.constant(indices), tf.constant(shape))
    if NATIVE == "torch":
        import torch

        return torch.sparse_coo_tensor(
            torch.tensor(indices, device=values.device)[None], values, shape, check_invariants=True
        )
    from jax.experimental.sparse import BCOO

    return BCOO((values, keras.ops.convert_to_tensor(indices)[:, None]), shape=shape)
