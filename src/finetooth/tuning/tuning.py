"""`tune`: from here until `finish()`, this model trains only the selection."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal

import keras

from ..backends import backend
from ..backends.tensor_region import read_region, write_region
from ..display.table import Shown, Table
from ..errors import TuningError
from ..keras_internals import marks
from ..keras_internals import private as keras_private
from ..keras_internals.weights import weights_by_path
from ..parts.composed import settle
from ..parts.trainable import TrainablePart
from ..patches.patch import Change, Patch
from ..selection.select import select
from ..selection.selection import Selection
from .attach import attached
from .optimizing import remember, remembered
from .plan import plan_tuning
from .running import check_not_running
from .split import Split, splitting
from .table import PartFacts, tuning_table
from .verify import Snapshot, Verification

_active: weakref.WeakSet[Tuning] = weakref.WeakSet()


def tune(
    model: keras.Model,
    *what: Any,
    statistics: Literal["frozen", "update"] = "frozen",
    layer_rules: bool = True,
) -> Tuning:
    """Train exactly the selected elements of a model, with stock `compile` and `fit`.

    Returns a `Tuning`, which is also a context manager: leaving the block finishes it. Until then the model's
    trainable weights are small *part* variables, so an optimizer neither sees nor moves anything else, and every read
    of the model, `evaluate`, `predict` and `save` among them, sees the merged weights.

    Args:
        model: A built Keras model.
        *what: What to train, at least one item: a `Selection`, or anything else `select` takes. Several are united.
        statistics: `"frozen"` keeps the statistics of normalisation layers, which then normalise with them as they do
            at inference. `"update"` lets those of layers with selected weights move.
        layer_rules: Whether layers that have a rule for it compute the gradient of the part alone (`print(tuning)`
            says which do). With False every layer reads the merged tensor, which gives the same results and costs a
            gradient of the whole tensor; for debugging.

    >>> import keras, finetooth as ft
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")])
    >>> with ft.tune(model, "a/kernel[:, 0]") as tuning:
    ...     model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.1), "mse")
    ...     _ = model.fit(keras.ops.ones((8, 4)), keras.ops.ones((8, 1)), epochs=3, verbose=0)
    >>> print(tuning.verify())
    Verified: all 15 frozen elements keep their bits.
    """
    if not isinstance(model, keras.Model):
        raise TuningError(f"`tune` takes a keras.Model; received {model!r} of type {type(model).__name__}.")
    if statistics not in ("frozen", "update"):
        raise TuningError(f'`statistics` is "frozen" or "update"; received {statistics!r}.')
    if not isinstance(layer_rules, bool):
        raise TuningError(f"`layer_rules` is True or False; received {layer_rules!r}.")
    if keras_private.is_tuned(model):
        raise TuningError(
            f"{model.name!r}, or a layer or weight of it, is being tuned already. Call finish() or revert() on that "
            "tuning first."
        )
    return Tuning(model, select(model, *what), statistics, layer_rules)


class Tuning(Shown):
    """A model that trains only a selection. Made by `tune`.

    >>> import keras, finetooth as ft
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="a")])
    >>> tuning = ft.tune(model, "a/kernel[0]")
    >>> [(v.name, v.shape) for v in model.trainable_variables] == [("kernel_part", (1, 3))]
    True
    >>> tuning.revert()
    >>> len(model.trainable_variables)
    2
    """

    def __init__(self, model: keras.Model, selection: Selection, statistics: str, layer_rules: bool):
        self.model = model
        self.selection = selection
        self._patch: Patch | None = None
        self._split: Split | None = None
        self._plan = plan_tuning(model, selection, statistics)
        self._old = {path: read_region(v, self._plan.regions[path]) for path, v in self._plan.changing.items()}
        self._snapshot = Snapshot(model, dict(selection.items()), self._plan.moving)
        self._parts = self._made_parts()
        with ExitStack() as stack:
            stack.enter_context(_kept_with(model, self))
            plan, parts = self._plan, self._parts.values()
            context = attached(model, parts, plan.by_themselves, plan.moving.values(), layer_rules)
            self._rules = stack.enter_context(context)
            self._attached = stack.pop_all()
        remember(model, self._parts.values())

    def _made_parts(self) -> dict[str, TrainablePart]:
        """Return a part for each variable that needs one: an earlier tuning's, while an optimizer holds it, or new."""
        parts = {}
        with backend.creation_scope(self.model):
            for path, variable in self._plan.in_parts.items():
                region = self._plan.regions[path]
                earlier = remembered(self.model, variable, region)
                parts[path] = TrainablePart(variable, region, self._old[path], earlier)
        return parts

    @property
    def active(self) -> bool:
        """Whether the model still trains the selection only."""
        return self._patch is None

    @property
    def moving(self) -> tuple[str, ...]:
        """The paths of the statistics that layers may update; none unless `statistics="update"`."""
        return tuple(self._plan.moving)

    @property
    def patch(self) -> Patch:
        """What has been trained so far, or in all once finished, and the statistics that have moved with it."""
        if self._patch is not None:
            return self._patch
        self._sync()
        changes = {}
        for path, region in self._plan.regions.items():
            part = self._parts.get(path)
            new = part.current() if part else read_region(self._plan.changing[path], region)
            changes[path] = Change(region, self._old[path], new)
        return Patch(changes)

    def verify(self) -> Verification:
        """Compare every frozen bit with what it was when tuning began."""
        self._sync()
        return self._snapshot.compare(self.model)

    def split(self) -> Split:
        """The frozen prefix of a Functional or Sequential model, to compute once per example, and what is above it.

        The same each time; it ends with the tuning. See `Split.features` for what is checked and what is kept.
        """
        if not self.active:
            raise TuningError(f"The tuning of {self.model.name!r} has ended. Call tune again, then split.")
        if self._split is None:
            context = splitting(self.model, self._plan.changing, self._parts.values(), self._rules)
            self._split = self._attached.enter_context(context)
        return self._split

    def finish(self) -> None:
        """Write the parts into the model and leave no other trace. Does nothing the second time."""
        if not self.active:
            return
        self._check_not_running()
        patch = self.patch
        self._settle()
        try:
            self._attached.close()
        finally:
            self._patch = patch

    def revert(self) -> None:
        """Give the selected elements their old values back and leave no trace at all, finished or not."""
        if not self.active:
            self.patch.revert(self.model)
            return
        self._check_not_running()
        self._sync()
        try:
            self._attached.close()
        finally:
            for path, variable in self._plan.changing.items():
                write_region(variable, self._plan.regions[path], self._old[path])
            self._patch = Patch({path: Change(self._plan.regions[path], old, old) for path, old in self._old.items()})

    def __enter__(self) -> Tuning:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def table(self) -> Table:
        """Return a table of what trains, how its gradient is computed, and what it costs."""
        by_lora = keras_private.lora_ids(self.model)
        return tuning_table(
            f"Tuning {self.model.name!r}" + ("" if self.active else " (finished)"),
            self.selection,
            {
                path: PartFacts(keras.backend.standardize_dtype(part.variable.dtype), self._rules.get(part, "dense"))
                for path, part in self._parts.items()
            },
            self._plan.moving,
            [path for path, variable in weights_by_path(self.model).items() if id(variable) in by_lora],
        )

    def summary(self) -> None:
        """Print the table."""
        print(self)

    def __repr__(self) -> str:
        state = "active" if self.active else "finished"
        return f"<Tuning of {self.selection.size:,} elements of {self.model.name!r}, {state}>"

    def _check_not_running(self) -> None:
        for model in (self.model, *((self._split.upper,) if self._split else ())):
            check_not_running(model)

    def _sync(self) -> None:
        """Have every variable hold its value. On JAX, `fit` takes the values out of them during an epoch."""
        for model in (self.model, *((self._split.upper,) if self._split else ())):
            if hasattr(model, "jax_state_sync"):
                model.jax_state_sync()
        for part in self._parts.values():
            part.link.sync()

    def _settle(self) -> None:
        """Write the parts into their bases, one after the other."""
        for part in self._parts.values():
            settle(part)


@contextmanager
def _kept_with(model: keras.Model, tuning: Tuning) -> Iterator[None]:
    """The model keeps its tuning: one that nobody holds on to must not end by itself."""
    model.__dict__[marks.TUNING] = tuning
    _active.add(tuning)
    try:
        yield
    finally:
        _active.discard(tuning)
        del model.__dict__[marks.TUNING]


@atexit.register
def _detach_all() -> None:
    """What is still being tuned when Python ends is let go of while that is possible in good order."""
    for tuning in list(_active):
        with tuning._attached:
            tuning._settle()
