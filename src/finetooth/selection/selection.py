"""Selection: which elements of a model, as an immutable value with set algebra."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..display.format import share
from ..display.table import Shown, Table
from ..errors import SelectionError
from ..regions.region import Region, Whole, empty


@dataclass(frozen=True)
class WeightSpec:
    """The shape and dtype of a variable, as a selection knows it; without values.

    `variable` returns the variable itself while the model that the selection was made from exists (a weak reference),
    and tells models with equal paths apart. It is not compared, and is not part of the plain form.
    """

    shape: tuple[int, ...]
    dtype: str
    variable: Callable[[], Any] = field(default=lambda: None, compare=False, repr=False)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Selection(Shown):
    """A set of elements of a model's weights: `{variable path: Region}`.

    Selections are made by `select`, `heads` and `top`. They combine with `|`, `&`, `-` and `~` (everything else in
    the model that can be trained), compare and hash by their elements, and iterate over variable paths.

    >>> import keras, finetooth as ft
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(2, name="b")])
    >>> part = ft.select(model, "a/kernel[:, :2]", "b/*")
    >>> len(part), list(part), part["a/kernel"].compact_shape
    (16, ['a/kernel', 'b/kernel', 'b/bias'], (4, 2))
    >>> (~part).size, part & ~part == ft.Selection({}, part.weights), "a/bias" in part
    (7, True, False)
    """

    def __init__(self, regions: Mapping[str, Region], weights: Mapping[str, WeightSpec]):
        for path, region in regions.items():
            if path not in weights:
                raise SelectionError(f"{path!r} is not among the weights {sorted(weights)}.")
            if region.shape != weights[path].shape:
                raise SelectionError(
                    f"The region for {path!r} belongs to shape {region.shape}; the variable has {weights[path].shape}."
                )
        self._weights = dict(weights)
        # A grid or points that hold every element are the whole variable, which trains as in plain Keras.
        whole = {path: Whole(weight.shape) for path, weight in weights.items()}
        chosen = {path: regions[path] for path in weights if path in regions and regions[path].size}
        self._regions = {path: whole[path] if whole[path] <= region else region for path, region in chosen.items()}

    @property
    def weights(self) -> Mapping[str, WeightSpec]:
        """Every weight a selection of this model can hold, selected or not."""
        return dict(self._weights)

    @property
    def size(self) -> int:
        """How many elements are selected."""
        return sum(region.size for region in self._regions.values())

    @property
    def total(self) -> int:
        """How many elements the model has that could be selected."""
        return sum(weight.size for weight in self._weights.values())

    @property
    def fraction(self) -> float:
        """`size / total`."""
        return self.size / self.total if self.total else 0.0

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return bool(self._regions)

    def __iter__(self) -> Iterator[str]:
        return iter(self._regions)

    def __getitem__(self, path: str) -> Region:
        if path in self._weights:
            return self._regions.get(path, empty(self._weights[path].shape))
        raise SelectionError(f"{path!r} is not a weight of this selection's model, which has {list(self._weights)}.")

    def items(self) -> Iterator[tuple[str, Region]]:
        """Pairs of variable path and region, in the model's order."""
        return iter(self._regions.items())

    def __contains__(self, item: object) -> bool:
        """Whether a variable has selected elements (`path in s`), or one element is selected (`(path, index) in s`)."""
        if isinstance(item, tuple) and len(item) == 2:
            path, index = item
            return path in self._regions and (index if isinstance(index, tuple) else (index,)) in self._regions[path]
        return item in self._regions

    def __or__(self, other: Selection) -> Selection:
        other, weights = self._aligned(other)
        return Selection({path: self._at(path, w) | other._at(path, w) for path, w in weights.items()}, weights)

    def __and__(self, other: Selection) -> Selection:
        other, weights = self._aligned(other)
        return Selection({path: self._at(path, w) & other._at(path, w) for path, w in weights.items()}, weights)

    def __sub__(self, other: Selection) -> Selection:
        other, weights = self._aligned(other)
        return Selection({path: self._at(path, w) - other._at(path, w) for path, w in weights.items()}, weights)

    def __invert__(self) -> Selection:
        everything = {path: Whole(weight.shape) for path, weight in self._weights.items()}
        return Selection(everything, self._weights) - self

    def __le__(self, other: Selection) -> bool:
        """Whether every selected element is selected in the other."""
        return not self - other

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return NotImplemented
        return self._regions == other._regions

    def __hash__(self) -> int:
        return hash(frozenset(self._regions.items()))

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-safe data; `Selection.from_dict` is the inverse."""
        return {
            "weights": {path: [list(w.shape), w.dtype] for path, w in self._weights.items()},
            "regions": {path: region.to_dict() for path, region in self._regions.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Selection:
        """The selection that `to_dict` described."""
        try:
            weights = {
                path: WeightSpec(tuple(int(n) for n in shape), str(dtype))
                for path, (shape, dtype) in data["weights"].items()
            }
            regions = {path: Region.from_dict(region) for path, region in data["regions"].items()}
        except SelectionError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SelectionError(f"This is not the plain form of a selection: {error!r}.") from None
        return cls(regions, weights)

    def __reduce__(self) -> tuple[Any, ...]:
        return Selection.from_dict, (self.to_dict(),)

    def table(self) -> Table:
        """The selection as a table: one row per variable that has selected elements."""
        rows = [
            (path, str(self._weights[path].shape), region.text(), f"{region.size:,}", share(region.size, weight.size))
            for path, region in self._regions.items()
            for weight in [self._weights[path]]
        ]
        return Table(
            title="Selection",
            columns=("variable", "shape", "region", "elements", "of variable"),
            rows=rows,
            right=("elements", "of variable"),
            caption=(f"{self.size:,} of {self.total:,} elements selected ({share(self.size, self.total)})",),
        )

    def __repr__(self) -> str:
        return f"<Selection of {self.size:,} elements in {len(self._regions)} variables>"

    def _at(self, path: str, weight: WeightSpec) -> Region:
        return self._regions.get(path, empty(weight.shape))

    def _aligned(self, other: Selection) -> tuple[Selection, dict[str, WeightSpec]]:
        """The other selection with the paths this one has for the same variables, and the weights of both."""
        if not isinstance(other, Selection):
            raise SelectionError(f"A selection combines with another selection; received {type(other).__name__}.")
        mine = {id(weight.variable()): path for path, weight in self._weights.items() if weight.variable() is not None}
        here = {path: mine.get(id(weight.variable()), path) for path, weight in other._weights.items()}
        if any(path != name for path, name in here.items()):
            other = Selection(
                {here[path]: region for path, region in other._regions.items()},
                {here[path]: weight for path, weight in other._weights.items()},
            )
        for path, weight in self._weights.items():
            if path in other._weights:
                _check_same_weight(path, weight, other._weights[path])
        return other, {**self._weights, **other._weights}


def _check_same_weight(path: str, a: WeightSpec, b: WeightSpec) -> None:
    if a != b:
        raise SelectionError(f"The selections belong to different models: {path!r} is {a} in one and {b} in the other.")
    if a.variable() is not None and b.variable() is not None and a.variable() is not b.variable():
        raise SelectionError(
            f"The selections belong to different models, which both have a variable {path!r}. "
            "Use `select(model, selection)` to carry a selection over to another model."
        )
