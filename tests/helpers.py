"""Comparisons the tests share."""

from __future__ import annotations

import keras
import numpy as np

import finetooth as ft
from finetooth import bits
from finetooth.naming import selectable, weights_by_path


def values(model: keras.Model) -> dict[str, np.ndarray]:
    """A copy of every weight, statistics included."""
    return {path: np.array(bits.read(variable)) for path, variable in weights_by_path(model).items()}


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
    moved = {}
    for path in before:
        if path in free:
            continue
        changed = bits.differing(before[path], after[path])
        if path in selection:
            changed = changed & ~selection[path].mask()
        if changed.any():
            moved[path] = int(changed.sum())
    return moved


def moved_inside(before: dict, after: dict, selection: ft.Selection) -> dict[str, int]:
    """How many selected elements changed, by path."""
    changed = {path: bits.differing(before[path], after[path]) for path in selection}
    return {path: int((changed[path] & region.mask()).sum()) for path, region in selection.items()}
