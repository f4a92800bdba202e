"""Patch: what was trained, as exact old and new values of the selected elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import keras
import numpy as np

from ..backends.tensor_region import read_region, write_region
from ..display.table import Shown, Table, share, size
from ..errors import PatchError
from ..keras_internals import private as keras_private
from ..keras_internals.weights import nearest, to_numpy, weights_by_path
from ..regions import bits
from ..regions.region import Region, points


@dataclass(frozen=True, eq=False)
class Change:
    """One variable's part of a patch: the region and its values before and after, in compact shape."""

    region: Region
    old: np.ndarray
    new: np.ndarray

    @property
    def moved(self) -> int:
        """How many of the elements have a new value."""
        return int(np.count_nonzero(bits.differing(self.old, self.new)))


class Patch(Shown):
    """The selected elements of a model before and after training: `{variable path: Change}`.

    `apply` and `revert` compare the model with what the patch expects first, and write only when all of it fits, so a
    model is either wholly patched or untouched. Values are absolute, not differences: reverting restores every bit.

    >>> import keras, finetooth as ft
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="a")])
    >>> copy = keras.models.clone_model(model)
    >>> copy.set_weights(model.get_weights())
    >>> with ft.tune(model, "a/kernel[:, 0]") as tuning:
    ...     model.compile("sgd", "mse")
    ...     _ = model.fit(keras.ops.ones((8, 4)), keras.ops.ones((8, 3)), verbose=0)
    >>> tuning.patch.apply(copy)
    >>> ft.diff(copy, model).size, tuning.patch.size
    (0, 4)
    """

    def __init__(self, changes: Mapping[str, Change]):
        self._changes = dict(changes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._changes)

    def __getitem__(self, path: str) -> Change:
        return self._changes[path]

    def __contains__(self, path: object) -> bool:
        return path in self._changes

    def items(self) -> Iterator[tuple[str, Change]]:
        """Pairs of variable path and change."""
        return iter(self._changes.items())

    @property
    def size(self) -> int:
        """How many elements the patch holds."""
        return sum(change.region.size for change in self._changes.values())

    @property
    def nbytes(self) -> int:
        """The bytes of the new values."""
        return sum(change.new.nbytes for change in self._changes.values())

    def apply(self, model: keras.Model) -> None:
        """Write the new values into a model that holds the old ones."""
        self._write(model, {path: (change.old, change.new) for path, change in self._changes.items()}, "apply")

    def revert(self, model: keras.Model) -> None:
        """Write the old values back into a model that holds the new ones."""
        self._write(model, {path: (change.new, change.old) for path, change in self._changes.items()}, "revert")

    def table(self) -> Table:
        """The patch as a table: what is in it and how far it moved."""
        rows = [
            (path, str(c.region.shape), c.region.text(), f"{c.region.size:,}", f"{c.moved:,}", _largest_move(c))
            for path, c in self._changes.items()
        ]
        return Table(
            title="Patch",
            columns=("variable", "shape", "region", "elements", "moved", "largest move"),
            rows=rows,
            right=("elements", "moved", "largest move"),
            caption=(
                f"{self.size:,} elements, {size(self.nbytes)} of new values, "
                f"{share(sum(c.moved for c in self._changes.values()), self.size)} moved",
            ),
        )

    def __repr__(self) -> str:
        return f"<Patch of {self.size:,} elements in {len(self._changes)} variables>"

    def _write(self, model: keras.Model, values: Mapping[str, tuple[np.ndarray, np.ndarray]], verb: str) -> None:
        weights = weights_by_path(model)
        if keras_private.is_tuned(model):
            raise PatchError(f"{model.name!r} is being tuned. Call finish() or revert() on that tuning, then {verb}.")
        problems = [
            f"{path}: {problem}"
            for path, (expected, _) in values.items()
            if (problem := _misfit(weights.get(path), self._changes[path].region, expected))
        ]
        if problems:
            hints = [nearest(path, self._changes[path].region.shape, weights) for path in values if path not in weights]
            shown = "".join(f"\n  {problem}" for problem in problems[:8])
            more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise PatchError(
                f"Cannot {verb} the patch to {model.name!r}; nothing was changed:{shown}{more}{_hint(hints)}"
            )
        begun = []
        try:
            for path, (_, wanted) in values.items():
                begun.append(path)
                write_region(weights[path], self._changes[path].region, wanted)
        except BaseException:
            for path in begun:
                write_region(weights[path], self._changes[path].region, values[path][0])
            raise


def diff(before: keras.Model, after: keras.Model) -> Patch:
    """The patch that turns one model into another of the same architecture: every element whose bits differ."""
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
    """The first that says something, on a line of its own."""
    return next((f"\n{hint}" for hint in hints if hint), "")


def _misfit(variable: keras.Variable | None, region: Region, expected: np.ndarray) -> str | None:
    """Why a change does not fit a variable, or None when it does."""
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


def _largest_move(change: Change) -> str:
    dtype = np.complex128 if change.new.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        moves = np.abs(change.new.astype(dtype) - change.old.astype(dtype))
    return f"{np.max(moves):.3g}"
