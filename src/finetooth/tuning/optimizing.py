"""Which optimizers may train a tuned model: new ones, and those that have trained exactly its trainable weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from ..backends import backend
from ..errors import TuningError
from ..keras_internals import marks
from ..keras_internals import private as keras_private
from ..optimizers.wrapper import Wrapper, copy_of
from ..parts.trainable import TrainablePart
from ..regions.region import Region

# The parts of each model's tunings: base, region, variable. They live on with an optimizer that holds them, no longer.
_parts: weakref.WeakKeyDictionary[keras.Model, list[tuple[Any, Region, Any]]] = weakref.WeakKeyDictionary()


def remember(model: keras.Model, parts: Iterable[TrainablePart]) -> None:
    """Keep weak references to the parts, so that an optimizer that trains them can go on in a later tuning."""
    alive = [entry for entry in _parts.get(model, []) if entry[2]() is not None]
    known = {id(variable()) for _, _, variable in alive}
    new = [part for part in parts if id(part.variable) not in known]
    _parts[model] = alive + [(weakref.ref(part.base), part.region, weakref.ref(part.variable)) for part in new]


def remembered(model: keras.Model, base: keras.Variable, region: Region) -> keras.Variable | None:
    """The part variable that an earlier tuning of the model had for this region, if an optimizer still holds it."""
    found = (variable() for of_base, known, variable in _parts.get(model, []) if of_base() is base and known == region)
    return next((variable for variable in found if variable is not None), None)


@contextmanager
def renewed_after(model: keras.Model) -> Iterator[None]:
    """Context manager: an optimizer that was built for parts and has trained nothing is as new afterwards."""
    collected = False
    try:
        yield
    except GeneratorExit:  # the model is garbage, and is collected at any time, while a graph is traced for instance
        collected = True
        raise
    finally:
        if not collected:
            _renew(getattr(model, "optimizer", None))


def _renew(optimizer: Any) -> None:
    if _is_built(optimizer) and not _steps(optimizer) and not isinstance(optimizer, Wrapper):
        if any(hasattr(variable, marks.PART) for variable in keras_private.trained_by(optimizer)):
            if (fresh := _copy(optimizer)) is not None:
                keras_private.unbuild(optimizer, fresh)


def check_optimizer(model: keras.Model) -> None:
    """Before a training function is made: build anew an optimizer that is unused, refuse one used for other weights."""
    optimizer, wanted = model.optimizer, model.trainable_variables
    if not _is_built(optimizer):
        return
    if [id(v) for v in keras_private.trained_by(optimizer)] == [id(v) for v in wanted]:
        return
    steps = _steps(optimizer)
    if steps or isinstance(optimizer, Wrapper):
        state = f"has trained other weights than these for {steps} steps" if steps else "was built for other weights"
        raise TuningError(
            f"The optimizer {optimizer.name!r} of {model.name!r} {state}, and what it has kept does not fit the "
            f"{len(wanted)} of this tuning. Call model.compile(...) with a new optimizer inside the tuning, then fit. "
            "An optimizer goes on from one tuning to the next of the same model only where the selection is the same."
        )
    fresh = _copy(optimizer)  # `evaluate`, or loading a file, has built it
    if fresh is None:
        raise TuningError(
            f"The optimizer {optimizer.name!r} of {model.name!r} was built for other weights, and its configuration "
            "does not make another like it. Call model.compile(...) with a new optimizer inside the tuning, then fit."
        )
    keras_private.unbuild(optimizer, fresh)
    with backend.creation_scope(model):
        optimizer.build(wanted)


def _copy(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer | None:
    """Return a new optimizer with the same settings; None where its configuration does not give one."""
    try:
        return copy_of(optimizer)
    except Exception:  # whatever the code of a user's optimizer or schedule raises
        return None


def _is_built(optimizer: Any) -> bool:
    return optimizer is not None and optimizer.built


def _steps(optimizer: Any) -> int:
    """How many times the optimizer was applied."""
    return max(int(keras.ops.convert_to_numpy(v)) for v in keras_private.step_counts(optimizer))
