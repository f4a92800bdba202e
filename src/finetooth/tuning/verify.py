"""Proof, on the user's own run, that nothing outside the selection moved."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import keras

from ..display.format import clean
from ..errors import TuningError
from ..keras_internals.weights import to_numpy, weights_by_path
from ..regions.bits import Fingerprint
from ..regions.region import Region, empty


@dataclass(frozen=True)
class Verification:
    """The result of `Tuning.verify`: true if every frozen bit is as it was.

    `checked` counts the frozen elements compared, `changed` maps a variable's path to how many of its frozen elements
    differ; a count of n may miss one in 256 of them, a count of 0 misses none.
    """

    checked: int
    changed: Mapping[str, int]

    @property
    def ok(self) -> bool:
        return not self.changed

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return f"Verified: all {self.checked:,} frozen elements keep their bits."
        lines = [f"  {clean(path)}: {count:,} elements" for path, count in self.changed.items()]
        total = f"{sum(self.changed.values()):,} of {self.checked:,} frozen elements changed:"
        return "\n".join([total, *lines])


class Snapshot:
    """Fingerprints of everything outside a selection: a quarter of a byte per byte of float32, no copy of the model."""

    def __init__(self, model: keras.Model, regions: Mapping[str, Region], moving: Collection[str]):
        self._regions = regions
        self._prints = {}
        self._checked = 0
        for path, variable in weights_by_path(model).items():
            region = regions.get(path, empty(variable.shape))
            frozen = math.prod(variable.shape) - region.size
            if frozen and path not in moving:
                self._prints[path] = Fingerprint.of(to_numpy(variable), region)
                self._checked += frozen

    def compare(self, model: keras.Model) -> Verification:
        """Return which frozen elements differ from those of the snapshot."""
        weights = weights_by_path(model)
        gone = [path for path in self._prints if path not in weights]
        if gone:
            raise TuningError(
                f"{model.name!r} no longer has the weights {gone[:8]} that its tuning began with. "
                f"It has {list(weights)[:8]}: a layer was renamed or replaced. Undo that, then call verify()."
            )
        changed = {}
        for path, before in self._prints.items():
            variable = weights[path]
            now = Fingerprint.of(to_numpy(variable), self._regions.get(path, empty(variable.shape)))
            moved = before.moved(now)
            if moved:
                changed[path] = moved
        return Verification(self._checked, changed)
