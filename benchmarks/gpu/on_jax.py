"""JAX: training steps, memory, and the operations that contenders written by hand need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from . import optimizers


def device_name() -> str:
    return jax.devices()[0].device_kind


def wait(result: Any) -> None:
    jax.block_until_ready(result)


def warm_up() -> None:
    """Nothing that would be counted."""


def free() -> None:
    jax.clear_caches()


def allocated() -> int:
    return 0


def peak_of(run: Callable[[], None]) -> None:
    """Not measured: the compiler knows, see `Steps`."""


def bits(array: jax.Array) -> np.ndarray:
    """A copy of an array's bits in main memory, as integers."""
    return np.array(array).view(f"u{array.dtype.itemsize}")


class Steps:
    """Training steps of a Keras model as `fit` runs them: compiled, and given all the old state to reuse.

    `peak` is what the compiled step needs: arguments, results that are not written into these, and everything between.
    """

    def __init__(self, model: keras.Model, data: Any, loss: Callable[..., Any], optimizer: type, masks: Any):
        self._model = model
        stepping = optimizers.made(optimizer)
        stepping.build(model.trainable_variables)

        def run(trainable: Any, frozen: Any, slots: Any, data: Any, masks: Any) -> Any:
            x, y = data

            def loss_of(trainable: Any) -> Any:
                outputs, state = model.stateless_call(trainable, frozen, x, training=True)
                return loss(outputs, y), state

            (value, state), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
            gradients = gradients if masks is None else [g * mask for g, mask in zip(gradients, masks)]
            trainable, slots = stepping.stateless_apply(slots, gradients, trainable)
            return (trainable, state, slots), value

        lists = model.trainable_variables, model.non_trainable_variables, stepping.variables
        self._state = tuple([variable.value for variable in variables] for variables in lists)
        compiled = jax.jit(run, donate_argnums=(0, 1, 2)).lower(*self._state, data, masks).compile()
        memory = compiled.memory_analysis()
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes
        self.peak = memory.argument_size_in_bytes + new + memory.temp_size_in_bytes

        def step() -> Any:
            self._state, value = compiled(*self._state, data, masks)
            return self._state, value

        self.step = step

    def settle(self) -> None:
        """Give the variables their values, the parts last: the state holds them as they were before the last step."""
        trainable, frozen, _ = self._state
        for variables, values in (
            (self._model.non_trainable_variables, frozen),
            (self._model.trainable_variables, trainable),
        ):
            for variable, value in zip(variables, values):
                variable.assign(value)


def token_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross entropy in float32."""
    logs = jax.nn.log_softmax(logits.astype("float32"))
    return -jnp.mean(jnp.take_along_axis(logs, targets[..., None], axis=-1))


def plus_product(y: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """y + a @ b."""
    return y + (a @ b).reshape(y.shape)


def live_product(points: jax.Array, x: jax.Array, kernel: keras.Variable, part: jax.Array) -> jax.Array:
    """x @ kernel with the part written into the kernel; the part's gradient is taken from the dense one."""
    old = kernel.value
    new = old.ravel().at[points].set(jax.lax.stop_gradient(part).astype(old.dtype), unique_indices=True)
    kernel.assign(new.reshape(old.shape))
    return _live_product(points, x, kernel.value, part)


@jax.custom_vjp
def _live_product(points: jax.Array, x: jax.Array, kernel: jax.Array, part: jax.Array) -> jax.Array:
    return x @ kernel


def _live_product_forward(points: jax.Array, x: jax.Array, kernel: jax.Array, part: jax.Array) -> Any:
    return x @ kernel, (points, x, kernel)


def _live_product_backward(saved: Any, dy: jax.Array) -> Any:
    points, x, kernel = saved
    return None, dy @ kernel.T, None, (x.T @ dy).ravel()[points].astype("float32")


_live_product.defvjp(_live_product_forward, _live_product_backward)
