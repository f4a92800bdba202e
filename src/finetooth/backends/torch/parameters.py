"""PyTorch: the parameters that a tuned layer lists as a module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch

from ...keras_internals import marks
from ...keras_internals import private as keras_private
from ...keras_internals.hooks import hooked


class _Parameters(torch.nn.ParameterDict):
    """The parameters of a tuned layer, parts among them. Its state, which is saved and loaded, is the plain layer's."""

    def __init__(self, parameters: dict[str, torch.Tensor], bases: dict[str, keras.Variable], parts: list[Any]):
        super().__init__(parameters)
        self.__dict__["_bases"] = bases
        self.__dict__["_part_ids"] = {id(parameter) for parameter in parts}

    def _save_to_state_dict(self, *args: Any) -> None:
        for part in self._composed().values():
            part.link.holds_merged()  # writes what is still to be written
        with self._without_parts():
            super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        for part in self._composed().values():
            part.link.holds_merged()
        with self._without_parts():
            super()._load_from_state_dict(state, prefix, *args)
        for name, part in self._composed().items():
            if prefix + name in state:
                part.load(keras_private.raw_value(part.base))

    def _composed(self) -> dict[str, Any]:
        """The parts, by the names of their bases."""
        found = {name: base.__dict__.get(marks.COMPOSED) for name, base in self._bases.items()}
        return {name: part for name, part in found.items() if part is not None}

    @contextmanager
    def _without_parts(self) -> Iterator[None]:
        listed = dict(self._parameters)
        for name, parameter in listed.items():
            if id(parameter) in self._part_ids:
                del self._parameters[name]
        try:
            yield
        finally:
            self._parameters.clear()
            self._parameters.update(listed)


@contextmanager
def parameters_listed(layer: keras.Layer, variables: list[keras.Variable]) -> Iterator[None]:
    listed, track = keras_private.TORCH_PARAMETERS
    before = getattr(layer, listed, None)

    def track_variables(original: Any) -> None:
        # Keras lists `variable.value`, which for a composed variable is a merged copy and no parameter.
        bases = {variable.path: variable for variable in layer.variables if not hasattr(variable, marks.PART)}
        named = bases | {f"{variable.path}@{id(variable)}": variable for variable in variables}
        parameters = {name: keras_private.raw_value(variable) for name, variable in named.items()}
        parts = [keras_private.raw_value(variable) for variable in variables]
        setattr(layer, listed, _Parameters(parameters, bases, parts))

    with hooked(layer, track, track_variables):
        getattr(layer, track)()
        try:
            yield
        finally:
            delattr(layer, listed)
            if before is not None:
                setattr(layer, listed, before)
