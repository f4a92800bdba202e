"""Scopes of Keras in which variables have other values than their own.

They use undocumented names of `keras.StatelessScope`: `original_scope`, `add_update`, `get_current_value`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from .private import raw_value


class AssignmentScope(keras.StatelessScope):
    """A scope that notes which variables are assigned, and assigns none.

    Variables have the values given here, or else those they have outside.
    """

    def __init__(
        self,
        values: Iterable[tuple[keras.Variable, Any]] = (),
        collect_losses: bool = False,
        initialize_variables: bool = False,
    ):
        super().__init__(collect_losses=collect_losses, initialize_variables=initialize_variables)
        self.assigned: dict[int, keras.Variable] = {}
        for variable, value in values:
            super().add_update((variable, value))

    def add_update(self, update: Any) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        outside = self.original_scope
        return outside.get_current_value(variable) if value is None and outside is not None else value


def in_stateless_scope() -> bool:
    """Return whether variables have other values than their own just now."""
    with keras.StatelessScope(initialize_variables=False) as scope:
        return scope.original_scope is not None


def has_scoped_value(variable: keras.Variable) -> bool:
    """Return whether the variable has another value than its own, in the stateless scope that is open."""
    with keras.StatelessScope(initialize_variables=False) as scope:
        outside = scope.original_scope
    return outside is not None and outside.get_current_value(variable) is not None


def current_value(variable: keras.Variable) -> Any:
    """Return the tensor that the variable holds just now, in a scope or by itself: not cast, not composed."""
    with keras.StatelessScope(initialize_variables=False) as scope:
        outside = scope.original_scope
    value = None if outside is None else outside.get_current_value(variable)
    return keras.ops.convert_to_tensor(raw_value(variable) if value is None else value)


@contextmanager
def outside_of_scopes() -> Iterator[None]:
    """Context manager: variables can be made, and hold their own values."""

    def switch_to(scope: Any) -> Any:
        with keras.StatelessScope(initialize_variables=False) as switch:
            before, switch.original_scope = switch.original_scope, scope
        return before

    before = switch_to(None)
    try:
        yield
    finally:
        switch_to(before)
