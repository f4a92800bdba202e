"""SelectiveOptimizer: any Keras optimizer, for a part of what it is given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from ..backends.tensor_region import TensorRegion, assign_whole, wide
from ..errors import TuningError
from ..keras_internals import private as keras_private
from ..parts.part import Part, check_trainable
from ..regions.indexing import resolve_index
from ..regions.region import Region, Whole
from ..selection.selection import Selection
from .slots import Slot, carry, shared_state, slots_of
from .wrapper import Wrapper, copy_of


@keras.saving.register_keras_serializable(package="finetooth")
class SelectiveOptimizer(Wrapper):
    """Trains the selected elements of the variables it is given, and leaves every bit of the others as it is.

    For loops of one's own, over variables of any kind that `Part` knows. It works in `fit` too, where `tune` is better:
    that saves the gradients of what is frozen as well. Gradients are given for whole variables, dense or sparse. The
    selected elements are taken from them, rows that repeat are summed, and the inner optimizer sees small variables
    that hold only these elements: its state, clipping, decay and averages are theirs alone. Then they are written in
    place. Constraints act on the whole variable and reach the selected elements.

    Args:
        inner_optimizer: Any Keras optimizer that has not been used yet.
        selection: A `Selection`, a mapping from variable paths to what `Part` takes as `at`, or pairs of a variable
            and such an `at`. Variables that do not occur are frozen. A path is the whole path of a variable; only the
            model's name, with which the paths of all variables begin or do not, may be left out.

    >>> import keras, numpy as np, finetooth as ft
    >>> table = keras.Variable(np.ones((4, 2), "float32"), name="table")
    >>> optimizer = ft.SelectiveOptimizer(keras.optimizers.AdamW(0.5), [(table, np.s_[1])])
    >>> optimizer.apply([keras.ops.ones((4, 2))], [table])
    >>> (table.numpy() == 1).all(axis=1).tolist()
    [True, False, True, True]
    """

    def __init__(self, inner_optimizer: keras.optimizers.Optimizer, selection: Any, name: str | None = None):
        super().__init__(inner_optimizer, name)
        # Past Keras' tracking, which wraps lists and dictionaries.
        self.__dict__["_wanted"] = _wanted(selection)
        self.__dict__["_paths"] = _paths_known_to(selection)  # of all variables to come, in order, or empty
        self.__dict__["_selected"] = {}  # the variables that are trained, by position

    def build(self, variables: Sequence[Any]) -> None:
        """Make the small variables for the selected elements, and the inner optimizer's state for them."""
        if self.built:
            return
        variables = list(variables)
        regions = self._matched(variables)
        for i, variable in enumerate(variables):
            if getattr(variable, "overwrite_with_gradient", False):
                self._selected[i] = _Selected(variable, regions.get(i))  # its gradient simply replaces it
            elif i in regions:
                check_trainable(variable, _name(variable))
                self._selected[i] = _Selected(variable, regions[i])
                if not _trains_itself(variable, regions[i]):
                    part = Part(variable, regions[i])
                    self._selected[i].train_apart(part, self._compact_variable(variable, part))
        self.inner_optimizer.build([selected.trained for selected in self._selected.values()])
        self._digest = _digest(regions, len(variables))
        self.build_wrapper(variables)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Update the selected elements by gradients of the whole variables."""
        positions = self.positions(grads, trainable_variables)
        self._refresh(positions)
        pairs = self._inner_pairs(grads, positions)
        if pairs:
            self.inner_optimizer.apply([g for g, _ in pairs], [v for _, v in pairs])
        self._write(positions)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """As Keras has it; the inner optimizer's own `stateless_apply` is used."""
        self.check_stateless(optimizer_variables, trainable_variables)
        positions = list(range(len(self.trained)))
        state = [*zip(self.trained, trainable_variables), *zip(self.variables, optimizer_variables)]
        with keras.StatelessScope(state_mapping=state) as scope:
            self._refresh(positions)
            pairs = self._inner_pairs(grads, positions, leave_out_missing=False)
            inner = self.inner_optimizer
            values, inner_state = inner.stateless_apply(
                [keras.ops.copy(v) for v in inner.variables],  # which PyTorch would write
                [g for g, _ in pairs],
                [keras.ops.copy(v) for _, v in pairs],
            )
            for (_, variable), value in zip(pairs, values):
                variable.assign(value)
            for variable, value in zip(inner.variables, inner_state):
                variable.assign(value)
            self._write(positions)
        new = [[scope.get_current_value(v) for v in variables] for variables in (self.trained, self.variables)]
        return tuple(new)

    def finalize_variable_values(self, var_list: Any) -> None:
        """At the end of training: averages, where the inner optimizer keeps them, become the values."""
        if not self.keeps_averages:
            return
        positions = self.positions(var_list, var_list)
        self._refresh(positions)
        self.inner_optimizer.finalize_variable_values([selected.trained for selected in self._selected.values()])
        self._write(positions)

    def reselected(self, selection: Any) -> SelectiveOptimizer:
        """A new optimizer for another selection of the same variables.

        It goes on where this one is. Elements that stay selected keep their state, those that are new begin with none.
        """
        if self.keeps_averages:
            raise TuningError("Averages of elements that were not selected do not exist. Leave use_ema out.")
        new = SelectiveOptimizer(copy_of(self.inner_optimizer), selection)
        if not self.built:
            return new
        new.build(self.trained)
        for i in self._selected.keys() & new._selected.keys():
            old, own = self._selected[i], new._selected[i]
            if old.part is not None and own.part is not None:
                carry(old.trained, old.region, own.trained, own.region)  # in the precision of training
        mine, theirs = self._slots(), new._slots()
        for i, kind in mine.keys() & theirs.keys():
            regions = self._selected[i].region, new._selected[i].region
            if None not in regions:
                for had, has in zip(mine[i, kind], theirs[i, kind]):
                    carry(had.variable, regions[0], has.variable, regions[1], kind)
        members = zip(*(keras_private.optimizers_in(o.inner_optimizer) for o in (self, new)))
        for old_member, member in members:  # each by itself: how much they keep may depend on the variables
            for state, copied in zip(shared_state(old_member), shared_state(member)):
                copied.assign(state)
        return new

    def get_config(self) -> dict[str, Any]:
        selection: dict[str, Any] = {}
        matched = self._wanted
        if self.built:
            matched = [(self._paths[i], one.region) for i, one in self._selected.items() if one.region is not None]
        for key, index in matched:
            name = _name(key)
            shape = index.shape if isinstance(index, Region) else getattr(key, "shape", None)
            if not name or shape is None:
                raise TuningError("A selection is saved by paths of variables and regions; give a Selection instead.")
            if name in selection:
                raise TuningError(f"Two selected variables have the path {name!r}; only paths are saved. Rename one.")
            selection[name] = resolve_index(shape, index).region.to_dict()
        return {**super().get_config(), "selection": selection, "paths": self._paths}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> SelectiveOptimizer:
        config = cls.with_inner(config, custom_objects)
        config["selection"] = {path: Region.from_dict(region) for path, region in config["selection"].items()}
        paths = config.pop("paths", [])
        optimizer = cls(**config)
        optimizer.__dict__["_paths"] = paths
        return optimizer

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        if self.built:
            store["selection"] = self._digest

    def load_own_variables(self, store: Any) -> None:
        """Load the state, which must be that of the same selection."""
        saved = store.keys()
        if saved and ("selection" not in saved or not np.array_equal(np.array(store["selection"]), self._digest)):
            raise TuningError(
                f"The saved state of {self.name!r} belongs to another selection. Use the one it was saved with, or "
                "train with a new optimizer."
            )
        super().load_own_variables({key: store[key] for key in saved if key != "selection"})

    def _slots(self) -> dict[tuple[int, tuple[int, ...] | None], list[Slot]]:
        """Return the inner optimizer's slots, by the position of their variable and the axes, None for all of them."""
        positions = {id(selected.trained): i for i, selected in self._selected.items()}
        slots: dict[tuple[int, tuple[int, ...] | None], list[Slot]] = {}
        for slot in slots_of(self.inner_optimizer):
            key = positions[id(slot.owner)], None if slot.elementwise else slot.axes
            slots.setdefault(key, []).append(slot)
        return slots

    def _matched(self, variables: list[Any]) -> dict[int, Region]:
        """The region of each variable that has one, by position. What is selected must be among the variables."""
        regions: dict[int, Region] = {}
        names = [_name(variable) for variable in variables]
        if _are_the_same(self._paths, names):
            names = self._paths
        self.__dict__["_paths"] = names
        for key, index in self._wanted:
            if isinstance(key, str):
                found = _positions(key, names)
            else:
                found = [i for i, variable in enumerate(variables) if variable is key]
            if len(found) != 1:
                problem = f"several of the variables could be meant: {[names[i] for i in found]}"
                if not found:
                    problem = f"none of the variables has that path: {names}"
                raise TuningError(
                    f"{_name(key)!r} is selected, and {problem}. Give a whole path, or a pair (variable, index)."
                )
            (i,) = found
            region = resolve_index(variables[i].shape, index).region
            regions[i] = regions[i] | region if i in regions else region
        if not any(region.size for region in regions.values()):
            raise TuningError("Nothing is selected: there is nothing to train.")
        return {i: region for i, region in sorted(regions.items()) if region.size}

    def _compact_variable(self, variable: Any, part: Part) -> Any:
        compact = self.add_variable(
            shape=part.shape,
            dtype=wide(keras.backend.standardize_dtype(variable.dtype)),
            name=f"{_name(variable).replace('/', '_').replace(':', '_')}_part",
        )
        assign_whole(compact, keras.ops.cast(part.read(), compact.dtype))
        return compact

    def _refresh(self, positions: Iterable[int]) -> None:
        """Read variables that were assigned elsewhere since the last step."""
        for i in positions:
            if i in self._selected:
                self._selected[i].refresh()

    def _inner_pairs(
        self, grads: Sequence[Any], positions: Sequence[int], leave_out_missing: bool = True
    ) -> list[tuple[Any, Any]]:
        pairs = []
        for i, gradient in zip(positions, grads):
            if i in self._selected and not (gradient is None and leave_out_missing):
                pairs.append((self._selected[i].gathered(gradient), self._selected[i].trained))
        return pairs

    def _write(self, positions: Iterable[int]) -> None:
        for i in positions:
            if i in self._selected:
                self._selected[i].write()


class _Selected:
    """One of the variables, with the region of it that is trained: by itself, or by a small variable in its place."""

    def __init__(self, variable: Any, region: Region | None):
        self.variable = variable
        self.region = region
        self.trained = variable  # what the inner optimizer is given
        self.part: Part | None = None
        self._tensor_region = None if region is None else TensorRegion(region)

    def train_apart(self, part: Part, trained: Any) -> None:
        """Train the part by another variable."""
        self.part, self.trained = part, trained

    def gathered(self, gradient: Any) -> Any:
        """Return the gradient of the trained variable, given that of the whole one."""
        if gradient is None or self._tensor_region is None:
            return gradient
        return keras.ops.cast(self._tensor_region.gather_gradient(gradient), self.trained.dtype)

    def refresh(self) -> None:
        """Read the variable; elements that it holds as they were written keep the precision of training."""
        if self.part is not None:
            now, known = self.part.read(), keras.ops.convert_to_tensor(self.trained)
            same = keras.ops.equal(keras.ops.cast(known, now.dtype), now)
            assign_whole(self.trained, keras.ops.where(same, known, keras.ops.cast(now, self.trained.dtype)))

    def write(self) -> None:
        """Write what was trained, constrained as the whole variable is."""
        if self.part is None:
            return
        value = keras.ops.convert_to_tensor(self.trained)
        value = keras.ops.cast(value, keras.backend.standardize_dtype(self.variable.dtype))
        constraint = getattr(self.variable, "constraint", None)
        if constraint is not None:
            whole = keras.ops.convert_to_tensor(self.variable)
            value = self.part.gather(constraint(self.part.tensor_region.scatter(whole, value)))
            assign_whole(self.trained, keras.ops.cast(value, self.trained.dtype))
        self.part.assign(value)


def _wanted(selection: Any) -> list[tuple[Any, Any]]:
    """Pairs of a variable, or the path of one, and an index or region."""
    if isinstance(selection, Selection):
        known = selection.weights
        return [(path if (v := known[path].variable()) is None else v, region) for path, region in selection.items()]
    if isinstance(selection, Mapping):
        return list(selection.items())
    if isinstance(selection, Iterable) and not isinstance(selection, str):
        pairs = list(selection)
        if all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            return pairs
    raise TuningError(
        "Expected a Selection, a mapping from paths to indices, or pairs (variable, index); received "
        f"{selection!r:.200} of type {type(selection).__name__}."
    )


def _trains_itself(variable: Any, region: Region) -> bool:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return isinstance(variable, keras.Variable) and isinstance(region, Whole) and wide(dtype) == dtype


def _paths_known_to(selection: Any) -> list[str]:
    """The paths of all weights of a selection's model."""
    if not isinstance(selection, Selection):
        return []
    return [_name(path if (v := weight.variable()) is None else v) for path, weight in selection.weights.items()]


def _positions(path: str, names: list[str]) -> list[int]:
    """Which of the variables a path names: in full, or without the model's name.

    Keras' paths begin with that or not, depending on when a layer was built. It is what all of them begin with.
    """
    accepted = {path}
    first = {name.partition("/")[0] for name in names if "/" in name}
    if len(first) == 1 and all("/" in name for name in names) and "/" in path:
        accepted.add(f"{first.pop()}/{path}")
    return [i for i, name in enumerate(names) if name in accepted]


def _are_the_same(saved: list[str], names: list[str]) -> bool:
    """Whether these are the paths of the same variables in the same order, with or without names of outer models."""
    ends = ((f"/{a}", f"/{b}") for a, b in zip(saved, names))
    return len(saved) == len(names) and all(a.endswith(b) or b.endswith(a) for a, b in ends)


def _name(variable: Any) -> str:
    return (
        variable if isinstance(variable, str) else getattr(variable, "path", None) or str(getattr(variable, "name", ""))
    )


def _digest(regions: Mapping[int, Region], count: int) -> np.ndarray:
    """The selection in 32 bytes, to know it again."""
    plain = json.dumps([count, {i: region.to_dict() for i, region in regions.items()}], sort_keys=True)
    return np.frombuffer(hashlib.sha256(plain.encode()).digest(), np.uint8)
