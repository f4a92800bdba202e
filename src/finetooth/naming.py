"""How a model's weights are named: by Keras path without the model's own name, each variable once."""

from __future__ import annotations

import keras

from .backends import keras_private
from .errors import SelectionError

PART_MARK = "_finetooth_part"  # attribute of the compact variables, which are no weights of the model


def weights_by_path(layer: keras.Layer) -> dict[str, keras.Variable]:
    """Every weight of a built layer or model, statistics included, in Keras' order.

    A variable that several layers share appears once. Keras starts the paths of sequential and subclassed models with
    the model's name, `sequential_3/dense/kernel`; it is left out here, so that equal models have equal paths. Where two
    variables have the same path, which Keras allows in subclassed models, the later ones are `path#2`, `path#3`.
    """
    if not isinstance(layer, keras.Layer):
        raise SelectionError(f"Expected a Keras model or layer; received {layer!r} of type {type(layer).__name__}.")
    if not layer.built:
        raise SelectionError(
            f"{layer.name!r} has no weights yet. Build it first: call it on data, or `build(input_shape)`."
        )
    weights = [variable for variable in layer.weights if not hasattr(variable, PART_MARK)]
    prefix = f"{layer.name}/" if isinstance(layer, keras.Model) else ""
    if not all(variable.path.startswith(prefix) for variable in weights):
        prefix = ""
    named: dict[str, keras.Variable] = {}
    seen: dict[str, int] = {}
    for variable in weights:
        path = variable.path.removeprefix(prefix)
        count = seen[path] = seen.get(path, 0) + 1
        named[path if count == 1 else f"{path}#{count}"] = variable
    return named


def selectable(layer: keras.Layer) -> dict[str, keras.Variable]:
    """The weights that gradients can train: floating, created trainable. A frozen layer's weights are among them."""
    made_trainable = {id(v) for inner in keras_private.layers_of(layer) for v in keras_private.made_trainable(inner)}
    return {
        path: variable
        for path, variable in weights_by_path(layer).items()
        if id(variable) in made_trainable
        and keras.backend.is_float_dtype(variable.dtype)
        and not variable.overwrite_with_gradient
    }
