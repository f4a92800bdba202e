"""JAX: branches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras


def concrete(condition: jax.Array) -> bool | None:
    return None if isinstance(condition, jax.core.Tracer) else bool(condition)


def assign_in_branch(
    condition: jax.Array, yes: Callable[[], Any], no: Callable[[], Any], variables: Sequence[keras.Variable]
) -> None:
    def values_after(function: Callable[[], Any], values: Sequence[jax.Array]) -> list[jax.Array]:
        with keras.StatelessScope(state_mapping=zip(variables, values)) as scope:
            function()
        return [scope.get_current_value(variable) for variable in variables]

    branches = (functools.partial(values_after, function) for function in (yes, no))
    after = jax.lax.cond(condition, *branches, [variable.value for variable in variables])
    for variable, value in zip(variables, after):
        variable.assign(value)
