"""The conditions of gates: what may be one, how it is saved, and what it says when the gate runs."""

from __future__ import annotations

from numbers import Real
from typing import Any

import keras
import numpy as np
from keras import ops

from ..errors import GateError
from ..keras_internals import private as keras_private


def is_chance(when: Any) -> bool:
    """Whether it is a number: the chance that a gate is open."""
    return isinstance(when, Real) and not isinstance(when, (bool, np.bool_))


def check_when(when: Any) -> None:
    """Whether a gate can be made with this condition; an error says why not."""
    if isinstance(when, keras.Variable):
        if when.trainable:
            raise GateError(f"{when.path!r} is trained. A condition is a keras.Variable(..., trainable=False).")
        truth(when, "when")
    elif is_chance(when):
        if not 0 <= when <= 1:
            raise GateError(f"A number is the chance that the gate is open, from 0 to 1; received {when!r}.")
    elif ops.is_tensor(when) or isinstance(when, (np.ndarray, keras.KerasTensor)):
        raise GateError(
            "A tensor would be the same at every step. Give it to the call, gate(x, when=tensor), or use a "
            "keras.Variable(..., trainable=False), which can be assigned."
        )
    elif not isinstance(when, (bool, np.bool_)) and (not callable(when) or isinstance(when, type)):
        raise GateError(
            "A condition is a boolean, a number from 0 to 1, a function of the step or a keras.Variable; "
            f"received {when!r} of type {type(when).__name__}."
        )


def settle(when: keras.Variable) -> None:
    """Let a variable keep its type when it is assigned, so that nothing is compiled again. Its value stays as it is.

    JAX gives one that was made of a Python number a weak type, which the first assignment changes.
    """
    if getattr(keras_private.raw_value(when), "weak_type", False):
        when.assign(ops.convert_to_numpy(when))


def truth(value: Any, name: str) -> Any:
    """A boolean, or a tensor of booleans of rank 0 or 1: all that is not zero is true."""
    if isinstance(value, (bool, np.bool_, int, float)):
        return bool(value)
    if isinstance(value, keras.KerasTensor):
        tensor = value
    else:
        try:
            tensor = ops.convert_to_tensor(value)
        except (TypeError, ValueError) as error:
            raise GateError(f"{name} is a boolean or a tensor of booleans or numbers; received {value!r}.") from error
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if "complex" in dtype or "string" in dtype:
        raise GateError(f"{name} is made of booleans or numbers; received {dtype}.")
    if len(tensor.shape) > 1:
        raise GateError(
            f"{name} is a scalar, or one value for each example (for each head, of a gate that is per_head); received "
            f"shape {tuple(tensor.shape)}. Use keras.ops.squeeze or any, whichever is meant."
        )
    if isinstance(value, keras.KerasTensor):
        return tensor
    return ops.not_equal(tensor, ops.zeros_like(tensor))


def written(when: Any) -> Any:
    """A condition in a configuration. A variable is what it holds."""
    if isinstance(when, keras.Variable):
        return {"variable": ops.convert_to_numpy(when).tolist(), "dtype": when.dtype}
    if isinstance(when, np.bool_):
        return bool(when)
    return float(when) if is_chance(when) else keras.saving.serialize_keras_object(when)


def read(config: Any, custom_objects: Any = None) -> Any:
    """Make the condition that `written` has saved. A variable is a new one."""
    if isinstance(config, dict) and "variable" in config:
        return keras.Variable(np.array(config["variable"]), dtype=config["dtype"], trainable=False, name="when")
    return keras.saving.deserialize_keras_object(config, custom_objects=custom_objects)
