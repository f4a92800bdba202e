"""Comparisons the tests share.

What says that nothing moved does not lean on the code it judges: weights are found through Keras and compared as bytes,
and masks are made from the plain form of a selection. Only the names of weights are finetooth's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import keras
import numpy as np
import pytest

import finetooth as ft
from finetooth.keras_internals.weights import selectable, weights_by_path


def values(model: keras.Model) -> dict[str, np.ndarray]:
    """Copy every weight of a model, statistics included."""
    named = weights_by_path(model)
    known = {id(variable) for variable in named.values()}
    gates = {id(v) for layer in model._flatten_layers() if isinstance(layer, ft.Gate) for v in layer.weights}
    nameless = [v for v in model.weights if id(v) not in known | gates and not v.name.endswith("_part")]
    assert not nameless, f"Weights without a name: {nameless}"
    return {path: np.array(keras.ops.convert_to_numpy(variable)) for path, variable in named.items()}


def bits(array: np.ndarray) -> np.ndarray:
    """The bytes of each element, along one more axis."""
    return np.frombuffer(array.tobytes(), np.uint8).reshape(*array.shape, array.dtype.itemsize)


def differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays differ in any bit."""
    assert a.dtype == b.dtype and a.shape == b.shape
    return (bits(a) != bits(b)).any(axis=-1)


def mask_of(region) -> np.ndarray:
    """Where a region is, from its plain form."""
    form = region.to_dict()
    mask = np.zeros(form["shape"], bool)
    if "points" in form:
        mask.reshape(-1)[form["points"]] = True
    elif "axes" in form:
        axes = [list(range(*a["range"])) if isinstance(a, dict) else a for a in form["axes"]]
        mask[np.ix_(*axes)] = True
    else:
        mask[...] = True
    return mask


def cases(*axes, quick: Callable[..., bool]) -> list:
    """Every combination of some values: `make test` runs those that `quick` accepts, `make test-all` all of them."""
    every = itertools.product(*axes)
    return [pytest.param(*case, marks=() if quick(*case) else pytest.mark.long) for case in every]


def copy_of(model: keras.Model) -> keras.Model:
    """An independent model with the same weights and, where the model has names, the same names."""
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    return copy


def random_selection(model: keras.Model, rng: np.random.Generator, share: float = 0.4) -> ft.Selection:
    """A random mask in every trainable weight, never empty."""
    items = []
    for variable in selectable(model).values():
        mask = rng.random(variable.shape) < share
        mask.reshape(-1)[rng.integers(mask.size)] = True
        items.append((variable, mask))
    return ft.select(model, *items)


def moved_outside(before: dict, after: dict, selection: ft.Selection, free: tuple[str, ...] = ()) -> dict[str, int]:
    """How many elements outside the selection changed any bit, by path; counted on full copies."""
    assert list(before) == list(after)
    moved = {}
    for path in before:
        if path in free:
            continue
        changed = differing(before[path], after[path])
        if path in selection:
            changed = changed & ~mask_of(selection[path])
        if changed.any():
            moved[path] = int(changed.sum())
    return moved


def moved_inside(before: dict, after: dict, selection: ft.Selection) -> dict[str, int]:
    """How many selected elements changed, by path."""
    changed = {path: differing(before[path], after[path]) for path in selection}
    return {path: int((changed[path] & mask_of(region)).sum()) for path, region in selection.items()}


def check_steps(after: dict, expected: dict, before: dict, trained: Iterable[str], share: float) -> None:
    """Two trainings have moved every weight alike, up to a share of its largest step; and those trained have moved."""
    for path, start in before.items():
        start = np.asarray(start, np.float64)
        step, wanted = (np.asarray(weights[path], np.float64) - start for weights in (after, expected))
        largest = np.abs(wanted).max()
        assert largest > 0 or path not in trained, path
        np.testing.assert_allclose(step, wanted, rtol=0, atol=share * largest, err_msg=path)
