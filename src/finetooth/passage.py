"""How a gated layer runs: as it is, with its weights held fast, for some of the examples, or not at all.

Nothing here knows of optimizers. Where the condition is only known once a compiled function runs, both ways are traced
as functions without side effects, and what the layer assigned or added to the loss comes out of them with the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from .backends import backend, keras_private

AddLoss = Callable[[Any], None]


class _Scope(keras.StatelessScope):
    """Nothing is assigned, but noted; variables have the values given here, or those they have outside."""

    def __init__(self, values: Sequence[tuple[keras.Variable, Any]] = ()):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.assigned: dict[int, keras.Variable] = {}
        for variable, value in values:
            super().add_update((variable, value))

    def add_update(self, update: Any) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        outside = self.original_scope
        return outside.get_current_value(variable) if value is None and outside is not None else value


def choose(
    condition: Any, live: Callable[[], Any], closed: Callable[[], Any], layer: keras.Layer | None, add_loss: AddLoss
) -> Any:
    """What `live`, a call of the layer, returns if the condition, a boolean or scalar, holds; else what `closed` does.

    Only one of them is computed. `closed` has no side effects.
    """
    known = condition if isinstance(condition, bool) else backend.known(condition)
    if known is not None:
        return live() if known else closed()
    outputs: list[Any] = []
    assigned: list[keras.Variable] = []
    losses: list[Any] = []

    def when_open() -> Any:
        with _Scope() as scope:
            outputs[:] = [live()]
        assigned[:] = scope.assigned.values()
        losses[:] = scope.losses
        return keras.tree.flatten(outputs), [scope.get_current_value(v) for v in assigned], list(losses)

    def when_closed() -> Any:  # which TensorFlow and JAX trace second
        zeros = [ops.zeros(loss.shape, loss.dtype) for loss in losses]
        return keras.tree.flatten([closed()]), [keras_private.current_value(v) for v in assigned], zeros

    flat, values, added = backend.branch(condition, when_open, when_closed)
    if layer is not None:
        keras_private.forget_losses(layer)
    _settle(zip(assigned, values), added, add_loss)
    return keras.tree.pack_sequence_as(outputs, flat)[0]


def _settle(assigned: Any, losses: Sequence[Any], add_loss: AddLoss) -> None:
    """Do what was only noted."""
    for variable, value in assigned:
        variable.assign(value)
    for loss in losses:
        add_loss(loss)


def held(call: Callable[..., Any], args: Any, kwargs: Any, layer: keras.Layer | None, outputs_too: bool) -> Any:
    """What the call returns, with no gradient for the layer's weights; for nothing, if that is so for the outputs too.

    Nothing is assigned, and nothing added to the loss.
    """
    floating = [] if layer is None else [v for v in layer.variables if keras.backend.is_float_dtype(v.dtype)]
    with _Scope([(v, ops.stop_gradient(keras_private.current_value(v))) for v in floating]):
        outputs = call(*args, **kwargs)
    if layer is not None:
        keras_private.forget_losses(layer)
    return keras.tree.map_structure(ops.stop_gradient, outputs) if outputs_too else outputs


def mixed(call: Callable[..., Any], condition: Any, args: Any, closed: Callable[[], Any]) -> Any:
    """For each example what `call` returns, or what `closed` does.

    The call is given an open example in place of each closed one: whatever those hold, it does not even meet a zero.
    """
    first = ops.argmax(ops.cast(condition, "int32"))

    def safe(x: Any) -> Any:
        open_one = ops.stop_gradient(ops.take(x, first, axis=0))
        return keras_private.with_mask(ops.where(_along(condition, x), x, open_one), like=x)

    outputs = call(*keras.tree.map_structure(safe, args))
    return keras.tree.map_structure(lambda a, b: ops.where(_along(condition, a), a, b), outputs, closed())


def _along(condition: Any, x: Any) -> Any:
    return ops.reshape(condition, (-1,) + (1,) * (len(x.shape) - 1))


def with_weights(
    layer: keras.Layer, args: Any, kwargs: Any, weights: Sequence[tuple[keras.Variable, Any]], add_loss: AddLoss
) -> Any:
    """What the layer returns if these of its weights are what is given here."""
    with _Scope(weights) as scope:
        outputs = layer(*args, **kwargs)
    keras_private.forget_losses(layer)
    _settle([(v, scope.get_current_value(v)) for v in scope.assigned.values()], scope.losses, add_loss)
    return outputs


@ops.custom_gradient
def tied(y: Any, flag: Any, said: Any, *below: Any) -> Any:
    """y itself; on the way back the flag's gradient is what is said, and those below get zeros."""

    def grad(*args: Any, upstream: Any = None) -> Any:
        upstream = args[0] if upstream is None else upstream
        return (upstream, said, ops.zeros_like(said), *(ops.zeros_like(x) for x in below))

    return y, grad


@ops.custom_gradient
def carried(y: Any, value: Any) -> Any:
    """The value, with the gradient of y."""

    def grad(*args: Any, upstream: Any = None) -> Any:
        upstream = args[0] if upstream is None else upstream
        return upstream, ops.zeros_like(upstream)

    return value, grad
