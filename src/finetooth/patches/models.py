"""Patches and Keras models: write a patch into a model, and find the patch between two models."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from ..backends.tensor_region import read_region, write_region
from ..errors import PatchError
from ..keras_internals import private as keras_private
from ..keras_internals.weights import nearest, to_numpy, weights_by_path
from ..regions import bits
from ..regions.region import Region, points
from .patch import Change, Patch

Values = Mapping[str, tuple[Region, np.ndarray, np.ndarray]]  # by path: a region, the values expected, those to write


def write(model: keras.Model, values: Values, verb: str) -> None:
    """Write regions of a model that holds the expected values in all of them; else raise and write nothing.

    Args:
        model: A built Keras model that is not being tuned.
        values: By path, the region, the values it must hold, and the values to write.
        verb: What the caller does, "apply" or "revert", for errors.
    """
    weights = weights_by_path(model)
    if keras_private.is_tuned(model):
        raise PatchError(f"{model.name!r} is being tuned. Call finish() or revert() on that tuning, then {verb}.")
    problems = [
        f"{path}: {problem}"
        for path, (region, expected, _) in values.items()
        if (problem := _misfit(weights.get(path), region, expected))
    ]
    if problems:
        hints = [nearest(path, region.shape, weights) for path, (region, _, _) in values.items() if path not in weights]
        shown = "".join(f"\n  {problem}" for problem in problems[:8])
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise PatchError(f"Cannot {verb} the patch to {model.name!r}; nothing was changed:{shown}{more}{_hint(hints)}")
    begun = []
    try:
        for path, (region, _, wanted) in values.items():
            begun.append(path)
            write_region(weights[path], region, wanted)
    except BaseException:
        for path in begun:
            region, expected, _ = values[path]
            write_region(weights[path], region, expected)
        raise


def diff(before: keras.Model, after: keras.Model) -> Patch:
    """Return the patch that turns one model into another of the same architecture: every element whose bits differ.

    Args:
        before: A built Keras model.
        after: Another, with the same paths, shapes and dtypes.

    Returns:
        A `Patch` for which `patch.apply(before)` gives `before` the weights of `after`.

    Raises:
        PatchError: If the models differ in the names, shapes or dtypes of their weights.

    >>> import keras, finetooth as ft
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="a")])
    >>> copy = keras.models.clone_model(model)
    >>> copy.set_weights(model.get_weights())
    >>> _ = copy.get_layer("a").bias.assign([0.0, 1.0, 0.0])
    >>> ft.diff(model, copy)
    <Patch of 1 elements in 1 variables>
    """
    old_weights, new_weights = weights_by_path(before), weights_by_path(after)
    if old_weights.keys() != new_weights.keys():
        only = sorted(old_weights.keys() ^ new_weights.keys())
        hints = [nearest(p, tuple(old_weights[p].shape), new_weights) for p in only if p in old_weights]
        raise PatchError(f"The models have different weights; only one of them has {only[:8]}.{_hint(hints)}")
    changes = {}
    for path in old_weights:
        old, new = to_numpy(old_weights[path]), to_numpy(new_weights[path])
        if old.shape != new.shape or old.dtype != new.dtype:
            raise PatchError(f"{path}: {old.dtype}{old.shape} in one model, {new.dtype}{new.shape} in the other.")
        region = points(old.shape, np.flatnonzero(bits.differing(old, new)))
        if region.size:
            changes[path] = Change(region, region.gather(old), region.gather(new))
    return Patch(changes)


def _hint(hints: list[str]) -> str:
    """Return the first hint that is not empty, on a new line."""
    return next((f"\n{hint}" for hint in hints if hint), "")


def _misfit(variable: keras.Variable | None, region: Region, expected: np.ndarray) -> str | None:
    """Return why a change does not fit a variable, or None if it does."""
    if variable is None:
        return "the model has no such variable"
    if tuple(variable.shape) != region.shape:
        return f"the variable has shape {tuple(variable.shape)}, the patch was made for {region.shape}"
    value = read_region(variable, region)
    if value.dtype != expected.dtype:
        return f"the variable is {value.dtype}, the patch was made for {expected.dtype}"
    differing = int(np.count_nonzero(bits.differing(value, expected)))
    if differing:
        return f"{differing:,} of {region.size:,} elements do not hold the values the patch expects"
    return None
