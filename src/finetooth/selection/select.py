"""`select`: from what a person says to a Selection."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from ..errors import SelectionError, brief
from ..keras_internals.weights import index_to_numpy, nearest, selectable, weights_by_path
from ..regions.indexing import region_at
from ..regions.region import Region, Whole
from .patterns import Pattern, parse
from .selection import Selection, WeightSpec

Predicate = Callable[[keras.Variable], bool]


def select(model: keras.Model, *what: Any) -> Selection:
    """The union of everything named, as a Selection of the model's trainable weights.

    Each item is one of:

    - text: a path glob with an optional index, `"**/ffn_*/kernel[:, :64]"`. `*` stands for anything inside one path
      segment, `**` for any number of segments; the index is NumPy-like, and index lists on several axes mean their
      outer product;
    - a layer or an inner model: all its trainable weights;
    - a variable;
    - a pair `(text or variable, index)` with `np.s_[...]`, an index list, or a boolean array;
    - a predicate, called with each variable;
    - another Selection, of this model or of one with the same paths.

    Paths name the layers from the model inwards, `encoder/dense/kernel`. Variables are matched by identity, so shared
    and tied weights are one variable. Statistics, such as the moving mean of a BatchNormalization, are not trained by
    gradients: globs pass over them and naming one is an error.

    >>> import keras, numpy as np, finetooth as ft
    >>> dense = keras.layers.Dense
    >>> model = keras.Sequential([keras.Input((8,)), dense(6, name="in"), dense(2, name="out")])
    >>> ft.select(model, "in/kernel[:, 1:3]", model.get_layer("out")).size
    30
    >>> ft.select(model, ("in/kernel", np.s_[[0, 7]]), lambda v: v.name == "bias").size
    20
    """
    weights = selectable(model)
    if not what:
        raise SelectionError(
            "The selection is empty: nothing was named. Pass at least one item, such as the text 'head/*', a layer, a "
            "variable or a Selection."
        )
    regions: dict[str, Region] = {}
    for item in what:
        for path, region in _resolve(model, weights, item):
            regions[path] = regions[path] | region if path in regions else region
    selection = Selection(regions, {path: weight_of(variable) for path, variable in weights.items()})
    if not selection:
        raise SelectionError(f"The selection is empty: {brief(what)} holds no element of {model.name!r}.")
    return selection


def weight_of(variable: keras.Variable) -> WeightSpec:
    """Describe a variable as selections know it."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return WeightSpec(tuple(variable.shape), dtype, weakref.ref(variable))


def _resolve(model: keras.Model, weights: dict[str, keras.Variable], item: Any) -> Iterator[tuple[str, Region]]:
    if isinstance(item, str):
        yield from _by_text(model, weights, item)
    elif isinstance(item, Selection):
        yield from _by_selection(model, weights, item)
    elif isinstance(item, keras.Layer):
        yield from _by_layer(model, weights, item)
    elif isinstance(item, keras.Variable):
        path = _path_of(model, weights, item)
        yield path, Whole(weights[path].shape)
    elif isinstance(item, tuple) and len(item) == 2:
        target, index = item
        if _can_select(index) and not (isinstance(index, keras.Variable) and _is_quantized(index)):
            raise _not_one(item)
        for path, region in _resolve(model, weights, target):
            if not isinstance(region, Whole):
                raise SelectionError(f"{target!r} has an index already; {index!r} cannot be added to it.")
            yield path, chosen_at(region.shape, index, path)
    elif callable(item) and not isinstance(item, type):
        yield from ((path, Whole(variable.shape)) for path, variable in weights.items() if item(variable))
    elif isinstance(item, (list, tuple, set, frozenset, dict)) and item and all(map(_can_select, item)):
        raise _not_one(item)
    else:
        raise SelectionError(
            f"Cannot select by {brief(item)} of type {type(item).__name__}. Expected text, a layer, a variable, a pair "
            "(text or variable, index), a predicate or a Selection."
        )


def _can_select(item: Any) -> bool:
    """Whether an item selects something by itself, and so is neither an index nor a part of one."""
    return isinstance(item, (str, Selection, keras.Layer, keras.Variable)) or (
        callable(item) and not isinstance(item, type)
    )


def _not_one(items: Any) -> SelectionError:
    return SelectionError(
        f"{brief(items)} is a {type(items).__name__} of several items. Pass them one by one, such as "
        "select(model, 'a/kernel', 'b/kernel') or select(model, *items); a pair is (text or variable, index)."
    )


def _by_text(model: keras.Model, weights: dict[str, keras.Variable], text: str) -> Iterator[tuple[str, Region]]:
    pattern = parse(text)

    def matching(named: dict[str, keras.Variable]) -> list[str]:
        found = [path for path in named if pattern.matches(path)]
        if not found and not {"*", "?"} & set(pattern.glob.split("/")[0]):
            found = [path for path, variable in named.items() if pattern.matches(variable.path)]  # Keras' own path
        return found

    matched = matching(weights)
    if not matched:
        every = weights_by_path(model)
        untrained = {path: every[path] for path in matching(every)}
        raise SelectionError(_nothing_matches(weights, text, pattern.glob, untrained))
    for path in matched:
        shape = weights[path].shape
        yield path, Whole(shape) if pattern.index is None else chosen_at(shape, pattern.index, path)


def _nothing_matches(
    weights: dict[str, keras.Variable], text: str, glob: str, untrained: dict[str, keras.Variable]
) -> str:
    if untrained:
        return f"{text!r} names {_not_trained(untrained)}"
    inside = f"{glob.rstrip('/')}/**"
    if any(Pattern(inside, None).matches(path) for path in weights):
        return f"{text!r} selects nothing: {glob!r} is a layer. Use {inside!r} for all its weights."
    nearest = difflib.get_close_matches(glob, weights, n=5, cutoff=0.3) or list(weights)[:5]
    return (
        f"{text!r} selects nothing: no variable path matches {glob!r}. Nearest paths: {nearest}. "
        "Use `finetooth inspect MODEL` to list them all."
    )


def _not_trained(variables: dict[str, keras.Variable]) -> str:
    """Why gradients do not train these, and what to do."""
    quantized = {path: v for path, v in variables.items() if _is_quantized(v)}
    if quantized:
        dtypes = sorted({keras.backend.standardize_dtype(v.dtype) for v in quantized.values()})
        return (
            f"{list(quantized)} of dtype {', '.join(dtypes)}, quantized or not floating, which gradients do not train. "
            "Select weights that are floating; to train a quantized layer, tune the model before it is quantized."
        )
    return (
        f"{list(variables)}, which gradients do not train: they are statistics. "
        'Use tune(..., statistics="update") to let the statistics of trained layers move.'
    )


def _is_quantized(variable: keras.Variable) -> bool:
    return not keras.backend.is_float_dtype(variable.dtype) or bool(variable.overwrite_with_gradient)


def _by_selection(
    model: keras.Model, weights: dict[str, keras.Variable], selection: Selection
) -> Iterator[tuple[str, Region]]:
    paths = {id(variable): path for path, variable in weights.items()}
    known = selection.weights
    for path, region in selection.items():
        path = paths.get(id(known[path].variable()), path)
        if path not in weights or tuple(weights[path].shape) != region.shape:
            raise SelectionError(
                f"The selection holds {path!r} of shape {region.shape}, which {model.name!r} does not have. "
                f"{nearest(path, region.shape, weights)}".rstrip()
            )
        yield path, region


def _by_layer(
    model: keras.Model, weights: dict[str, keras.Variable], layer: keras.Layer
) -> Iterator[tuple[str, Region]]:
    inside = {id(variable) for variable in layer.weights}
    matched = [(path, Whole(variable.shape)) for path, variable in weights.items() if id(variable) in inside]
    if not matched:
        reason = "none of its weights is a trainable weight of the model" if inside else "it has no weights"
        raise SelectionError(f"Layer {layer.name!r} selects nothing in {model.name!r}: {reason}.")
    yield from matched


def _path_of(model: keras.Model, weights: dict[str, keras.Variable], wanted: keras.Variable) -> str:
    for path, variable in weights.items():
        if variable is wanted:
            return path
    untrained = {path: v for path, v in weights_by_path(model).items() if v is wanted}
    if untrained:
        raise SelectionError(f"The variable is {_not_trained(untrained)}")
    raise SelectionError(f"Variable {wanted.path!r} is not a trainable weight of {model.name!r}, but another model's.")


def chosen_at(shape: Any, index: Any, where: str) -> Region:
    """The region that an index addresses, with errors that begin by saying where."""
    if isinstance(index, Region):
        return index
    try:
        return region_at(shape, index_to_numpy(index))
    except SelectionError as error:
        raise SelectionError(f"{where}: {error}") from None
