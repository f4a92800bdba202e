"""The value of a patch: exact old and new values of selected elements, by the path of their variable. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..display.format import share, size
from ..display.table import Shown, Table
from ..regions import bits
from ..regions.region import Region

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True, eq=False)
class Change:
    """The change of one variable: a region, and its values before and after, in the region's compact shape."""

    region: Region
    old: np.ndarray
    new: np.ndarray

    @property
    def moved(self) -> int:
        """The number of elements whose bits differ between `old` and `new`."""
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
        """Return pairs of variable path and change."""
        return iter(self._changes.items())

    @property
    def size(self) -> int:
        """The number of elements in the patch, moved or not."""
        return sum(change.region.size for change in self._changes.values())

    @property
    def nbytes(self) -> int:
        """The size of the new values in bytes."""
        return sum(change.new.nbytes for change in self._changes.values())

    def apply(self, model: keras.Model) -> None:
        """Write the new values into a model that holds the old ones.

        Args:
            model: A built Keras model with the same paths, shapes and dtypes, which no tuning is attached to.

        Raises:
            PatchError: If the model does not hold every old value, bit for bit. Then nothing is written.
        """
        from .models import write  # imported here, so that a patch is read and shown without Keras

        write(model, {path: (c.region, c.old, c.new) for path, c in self.items()}, "apply")

    def revert(self, model: keras.Model) -> None:
        """Write the old values back into a model that holds the new ones: the inverse of `apply`, with its errors."""
        from .models import write

        write(model, {path: (c.region, c.new, c.old) for path, c in self.items()}, "revert")

    def table(self) -> Table:
        """Return a table with one row per variable: its region, and how many of its elements moved, and how far."""
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


def _largest_move(change: Change) -> str:
    dtype = np.complex128 if change.new.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        moves = np.abs(change.new.astype(dtype) - change.old.astype(dtype))
    return f"{np.max(moves):.3g}"
