"""Names of a model's weights: by the layers they sit in, from the model inwards, each variable once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from ..errors import SelectionError
from . import marks
from . import private as keras_private


def weights_by_path(layer: keras.Layer) -> dict[str, keras.Variable]:
    """Return every weight of a built layer or model, statistics included, in Keras' order.

    The weights of a model are named by its layers: `dense/kernel`, `encoder/dense/kernel` for a layer of an inner
    model. Keras' own paths depend on where a layer was built, so that saving and loading a model changes them
    (`sequential_3/dense/kernel` becomes `dense/kernel`, and an inner model's name comes or goes); these names stay.
    The weights of a lone layer, which does not know its model, have Keras' paths.

    A variable that several layers share appears once. Where two variables would have the same path, which subclassed
    models allow, the later ones are `path#2`, `path#3`.
    """
    if not isinstance(layer, keras.Layer):
        raise SelectionError(f"Expected a Keras model or layer; received {layer!r} of type {type(layer).__name__}.")
    if not layer.built:
        raise SelectionError(
            f"{layer.name!r} has no weights yet. Build it first: call it on data, or `build(input_shape)`."
        )
    paths = _paths(layer) if isinstance(layer, keras.Model) else {}
    named: dict[str, keras.Variable] = {}
    gates = [inner for inner in keras_private.layers_of(layer) if hasattr(inner, marks.GATE)]
    of_gates = {id(v) for gate in gates for v in keras_private.own_variables(gate)}  # whether they are open
    for variable in layer.weights:
        if hasattr(variable, marks.PART) or id(variable) in of_gates:
            continue
        path = name = paths.get(id(variable), variable.path)
        count = 1
        while name in named:
            count += 1
            name = f"{path}#{count}"
        named[name] = variable
    return named


def selectable(layer: keras.Layer) -> dict[str, keras.Variable]:
    """Return the weights that gradients can train: floating, created trainable. Those of frozen layers are included."""
    weights = weights_by_path(layer)
    made_trainable = {id(v) for inner in keras_private.layers_of(layer) for v in keras_private.made_trainable(inner)}
    return {
        path: variable
        for path, variable in weights.items()
        if id(variable) in made_trainable
        and keras.backend.is_float_dtype(variable.dtype)
        and not variable.overwrite_with_gradient
    }


def nearest(path: str, shape: tuple[int, ...], weights: Mapping[str, keras.Variable]) -> str:
    """Say which weight a path that a model lacks may mean there, and how to give both models the same names."""
    alike = [other for other, variable in weights.items() if tuple(variable.shape) == shape]
    close = difflib.get_close_matches(path, alike, n=1, cutoff=0.6)
    if not close:
        return ""
    return (
        f"The nearest of that shape is {close[0]!r}. Automatic names differ between two models made by the "
        "same code in one process: name the layers, make the second with keras.models.clone_model, or load it."
    )


def _paths(model: keras.Model) -> dict[int, str]:
    """Return the path of every weight, by the variable's id: the shortest way, through the layer that made it."""
    paths: dict[int, str] = {}
    borrowed: dict[int, str] = {}
    seen = {id(model)}
    level = [("", model)]
    while level:
        for prefix, layer in level:
            for variable in keras_private.own_variables(layer):
                made_here = layer is model or variable.path.endswith(f"{layer.name}/{variable.name}")
                (paths if made_here else borrowed).setdefault(id(variable), prefix + variable.name)
        inner = [
            (f"{prefix}{child.name}/", child) for prefix, layer in level for child in keras_private.inner_layers(layer)
        ]
        level = [(prefix, layer) for prefix, layer in inner if id(layer) not in seen]
        seen.update(id(layer) for _, layer in level)
    return borrowed | paths


def to_numpy(variable: keras.Variable) -> np.ndarray:
    """Return the variable's value as a NumPy array of the same dtype."""
    return np.asarray(keras.ops.convert_to_numpy(variable))


def index_to_numpy(index: Any) -> Any:
    """Return an index in which tensors, of whatever device, are NumPy arrays."""
    if isinstance(index, tuple):
        return tuple(index_to_numpy(entry) for entry in index)
    return keras.ops.convert_to_numpy(index) if keras.ops.is_tensor(index) else index
