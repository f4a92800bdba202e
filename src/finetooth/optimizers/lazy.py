"""LazyOptimizer: any elementwise Keras optimizer, for the rows that a batch used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ..backends import backend
from ..errors import TuningError
from ..keras_internals import private as keras_private
from ..keras_internals.hooks import hooked
from .slots import slots_of
from .wrapper import Wrapper, copy_of


@keras.saving.register_keras_serializable(package="finetooth")
class LazyOptimizer(Wrapper):
    """Updates only the rows of a table that a batch has looked up, and only their state.

    A sparse gradient (`tf.IndexedSlices`, a sparse tensor of PyTorch with one sparse dimension, a BCOO array of JAX)
    names the rows that were used. They and their state are gathered, rows that repeat are summed, the inner optimizer
    takes its step on these alone, and they are written back: the time does not depend on the size of the table. Dense
    gradients are applied as the inner optimizer does.

    This is not what the inner optimizer would do with the same gradient made dense. Dense Adam moves every row at every
    step: momentum carries on in rows that were not used, their second moments fade, weight decay acts. Here such rows
    stand still until they are used again, with the state they had. The step count, in the correction of Adam's bias, is
    that of the training and not of the row. For plain SGD and Adagrad lazy and dense are the same; for Adam the results
    differ, for better or worse.

    The inner optimizer's rule must be elementwise, which is checked by trying it; Lamb, Muon and Adafactor are not.

    Args:
        inner_optimizer: A Keras optimizer that has not been used yet, without averages (`use_ema`) and accumulation,
            which concern every row at every step.

    >>> import keras, finetooth as ft
    >>> optimizer = ft.LazyOptimizer(keras.optimizers.Adam(1e-3))
    >>> ft.LazyOptimizer(keras.optimizers.Lamb())
    Traceback (most recent call last):
    finetooth.errors.TuningError: The rule of Lamb is not elementwise: how it moves a row depends on others, ...
    """

    def __init__(self, inner_optimizer: keras.optimizers.Optimizer, name: str | None = None):
        super().__init__(inner_optimizer, name)
        _check_lazy(inner_optimizer)
        # A copy of the inner optimizer that steps on rows. Nothing stays in it from one step to the next.
        kind = keras_private.undistributed(type(inner_optimizer))
        self.__dict__["_core"] = kind.from_config(inner_optimizer.get_config())

    def build(self, variables: Sequence[Any]) -> None:
        """Make the inner optimizer's state for the whole variables."""
        if self.built:
            return
        variables = list(variables)
        for variable in variables:
            if getattr(variable, "constraint", None) is not None:
                raise TuningError(
                    f"{variable.path!r} has a constraint, which reads all of it. Remove it, or use the inner optimizer."
                )
        inner, core = self.inner_optimizer, self._core
        rows = [Rows(variable) for variable in variables]
        inner.build(variables)
        whole, held = slots_of(inner), _built_for_rows(core, rows)
        self.__dict__["_rows"] = [
            [(variable, own), *((slot.variable, h) for slot, h in zip(whole, held) if slot.owner is variable)]
            for variable, own in zip(variables, rows)
        ]
        states = {id(state) for state in [*(slot.variable for slot in whole), *held]}
        shared = [[v for v in made if id(v) not in states] for made in (inner.variables, core.variables)]
        self.__dict__["_shared"] = list(zip(*shared))
        keras_private.decay_like(core, inner, dict(zip(map(id, rows), variables)))
        self.build_wrapper(variables)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Update the variables, those with a sparse gradient in the rows it has."""
        positions = self.positions(grads, trainable_variables)
        grads = self._clipped(list(grads))
        sparse = [(i, found) for i, g in zip(positions, grads) if g is not None and (found := backend.sparse_rows(g))]
        lazy = {i for i, _ in sparse}
        dense = [(g, self.trained[i]) for i, g in zip(positions, grads) if i not in lazy]
        more = any(g is not None for g, _ in dense)
        if sparse:
            self._step_on_rows(sparse, last=not more)
        if more or not sparse:
            self.inner_optimizer.apply([g for g, _ in dense], [v for _, v in dense])

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """As Keras has it."""
        self.check_stateless(optimizer_variables, trainable_variables)
        state = [*zip(self.trained, trainable_variables), *zip(self.variables, optimizer_variables)]
        with keras.StatelessScope(state_mapping=state) as scope:
            self.apply(grads, self.trained)
        new = [[scope.get_current_value(v) for v in variables] for variables in (self.trained, self.variables)]
        return tuple(new)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> LazyOptimizer:
        return cls(**cls.with_inner(config, custom_objects))

    def _step_on_rows(self, sparse: list[tuple[int, tuple[Any, Any]]], last: bool) -> None:
        """Gather, step, write back. What the optimizer shares between rows goes there, and back unless more follows."""
        for own, core in self._shared:
            core.assign(own)
        gradients, used = [], []
        for i, (indices, values) in sparse:
            rows, gradient = backend.distinct_rows(indices, values, self.trained[i].shape[0])
            for whole, held in self._rows[i]:
                held.assign(backend.read_rows(whole, rows))
            gradients.append(gradient)
            used.append((rows, self._rows[i]))
        self._core.apply(gradients, [held[0][1] for _, held in used])
        for rows, pairs in used:
            for whole, held in pairs:
                backend.write_rows(whole, rows, held.taken())
        if last:
            for own, core in self._shared:
                own.assign(core)

    def _clipped(self, grads: list[Any]) -> list[Any]:
        """Clipping by the norm of all gradients, which the two steps to come each see a part of."""
        if not self.inner_optimizer.global_clipnorm:
            return grads
        parts = [(g, backend.sparse_rows(g)) for g in grads if g is not None]
        sums = []
        for gradient, sparse in parts:
            if sparse is not None:
                _, gradient = backend.distinct_rows(*sparse, int(gradient.shape[0]))
            sums.append(keras.ops.sum(keras.ops.square(gradient)))
        norm = keras.ops.sqrt(sum(sums[1:], sums[0]))
        limit = self.inner_optimizer.global_clipnorm
        scale = limit / keras.ops.maximum(norm, limit)
        return [g if g is None else backend.scale_gradient(g, scale) for g in grads]


class Rows(keras.Variable):
    """A variable for the rows of another that a batch uses: it has the shape of what it was last assigned.

    It holds nothing between steps.
    """

    def __init__(self, like: Any):
        dtype = keras.backend.standardize_dtype(like.dtype)
        name = str(like.name).replace("/", "_").replace(":", "_")
        with backend.outside_of_graphs():
            super().__init__(np.zeros((0, *like.shape[1:])), dtype=dtype, trainable=False, name=f"{name}_rows")
        self._rows: Any = None

    @property
    def value(self) -> Any:
        return super().value if self._rows is None else self._rows

    @property
    def shape(self) -> Any:
        return self.value.shape  # of the backend's own kind, which Keras' operations for TensorFlow insist on

    def assign(self, value: Any) -> Any:
        fits = keras.backend.standardize_dtype(value.dtype) == self.dtype  # a cast to the same is not free on PyTorch
        self._rows = value if fits else keras.ops.cast(value, self.dtype)
        return self._rows

    def taken(self) -> Any:
        """Return the rows, and forget them."""
        rows, self._rows = self.value, None
        return rows


def _built_for_rows(optimizer: Any, rows: list[Rows]) -> list[Rows]:
    """Build the optimizer, which makes its state of rows, too. Returns that in the order in which it is made."""
    made: list[Rows] = []

    def add(original: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(Rows(reference_variable))
        return made[-1]

    with hooked(optimizer, "add_variable_from_reference", add):
        optimizer.build(rows)
    return made


def _check_lazy(optimizer: keras.optimizers.Optimizer) -> None:
    name = type(optimizer).__name__
    if hasattr(optimizer, "inner_optimizer"):
        raise TuningError(f"{name} wraps another optimizer. Wrap it around the LazyOptimizer instead.")
    if optimizer.use_ema or optimizer.gradient_accumulation_steps:
        raise TuningError("use_ema and gradient_accumulation_steps concern every row at every step. Leave them out.")
    with backend.outside_of_graphs():
        if not _is_elementwise(optimizer):
            raise TuningError(
                f"The rule of {name} is not elementwise: how it moves a row depends on others, which are not read "
                "here. Use Adam, SGD, Adagrad or another that treats each element by itself."
            )


def _is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether rows are moved alike with and without others beside them. Tried on a few, for a few steps."""
    rng = np.random.default_rng(0)
    start, chosen = rng.normal(size=(4, 3)).astype("float32"), [0, 2]
    variables = [keras.Variable(start), keras.Variable(start[chosen])]
    optimizers = [copy_of(optimizer, clipnorm=None, global_clipnorm=None, loss_scale_factor=None) for _ in variables]
    for step in range(3):
        gradient = (10.0**step * rng.normal(size=start.shape)).astype("float32")
        for copy, variable, own in zip(optimizers, variables, (gradient, gradient[chosen])):
            copy.apply([keras.ops.convert_to_tensor(own)], [variable])
    with_others, alone = (keras.ops.convert_to_numpy(variable) for variable in variables)
    return bool(np.allclose(with_others[chosen], alone, rtol=1e-4, atol=1e-7))
