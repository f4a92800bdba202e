"""How a gated layer runs: as it is, with its weights held fast, for some of the examples, or not at all.

Nothing here knows of optimizers. Where the condition is only known once a compiled function runs, both ways are traced
as functions without side effects, and what the layer assigned or added to the loss comes out of them with the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from ..backends import backend
from ..keras_internals import private as keras_private
from ..keras_internals import scopes
from ..keras_internals.masks import keeping_mask, mask_of, with_mask

# The gradient of an open gate's flag. Its square is zero in float32, so it changes no norm that a loop computes of all
# gradients; and it stays above zero when gradients are divided by loss scales, numbers of steps and norms.
FAINT = 2.0**-80

AddLoss = Callable[[Any], None]


def choose(
    condition: Any, live: Callable[[], Any], closed: Callable[[], Any], layer: keras.Layer | None, add_loss: AddLoss
) -> Any:
    """What `live`, a call of the layer, returns if the condition, a boolean or scalar, holds; else what `closed` does.

    Only one of them is computed. `closed` has no side effects.
    """
    known = condition if isinstance(condition, bool) else backend.concrete(condition)
    if known is not None:
        return live() if known else closed()
    outputs: list[Any] = []
    masked: dict[int, int] = {}  # the rank of the Keras mask of each output that has one, by position
    assigned: list[keras.Variable] = []
    losses: list[Any] = []

    def when_open() -> Any:
        with scopes.AssignmentScope(collect_losses=True) as scope:
            outputs[:] = [live()]
        assigned[:] = scope.assigned.values()
        losses[:] = scope.losses
        flat = keras.tree.flatten(outputs)
        masks = {i: mask for i, y in enumerate(flat) if (mask := mask_of(y)) is not None}
        masked.update({i: len(mask.shape) for i, mask in masks.items()})
        return flat, list(masks.values()), [scope.get_current_value(v) for v in assigned], list(losses)

    def when_closed() -> Any:  # which TensorFlow and JAX trace second
        flat = keras.tree.flatten([closed()])
        masks = [_mask_or_ones(flat[i], rank) for i, rank in masked.items()]
        zeros = [ops.zeros(loss.shape, loss.dtype) for loss in losses]
        return flat, masks, [scopes.current_value(v) for v in assigned], zeros

    flat, masks, values, added = backend.branch(condition, when_open, when_closed)
    if layer is not None:
        keras_private.forget_losses(layer)
    _settle(zip(assigned, values), added, add_loss)
    for i, mask in zip(masked, masks):
        flat[i] = with_mask(flat[i], mask)
    return keras.tree.pack_sequence_as(outputs, flat)[0]


def _mask_or_ones(y: Any, rank: int) -> Any:
    mask = mask_of(y)
    return ops.ones(ops.shape(y)[:rank], "bool") if mask is None else mask


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
    values = [(v, ops.stop_gradient(scopes.current_value(v))) for v in floating]
    with scopes.AssignmentScope(values, collect_losses=True):
        outputs = call(*args, **kwargs)
    if layer is not None:
        keras_private.forget_losses(layer)
    if not outputs_too:
        return outputs
    return keras.tree.map_structure(lambda y: keeping_mask(ops.stop_gradient, y), outputs)


def mixed(call: Callable[..., Any], condition: Any, args: Any, kwargs: Any, closed: Callable[[], Any]) -> Any:
    """Return for each example what `call` returns where the condition holds, else what `closed` does.

    `call` is given an open example in place of each closed one: no value in a closed example, not even NaN, reaches a
    gradient. Tensors among the arguments whose first axis is not that of the examples are passed on as they are.
    """
    count = example_count(condition, args)
    first = ops.argmax(ops.cast(condition, "int32"))

    def filled(x: Any) -> Any:
        return _chosen(condition, x, ops.stop_gradient(ops.take(x, first, axis=0)))

    def safe(x: Any) -> Any:
        if not hasattr(x, "shape") or not len(x.shape) or x.shape[0] not in (None, count):
            return x
        mask = mask_of(x)
        return with_mask(filled(x), None if mask is None else filled(mask))

    def both(a: Any, b: Any) -> Any:
        mask, other = mask_of(a), mask_of(b)
        return with_mask(_chosen(condition, a, b), None if mask is None else _chosen(condition, mask, other))

    safe_args, safe_kwargs = keras.tree.map_structure(safe, (args, kwargs))
    return keras.tree.map_structure(both, call(*safe_args, **safe_kwargs), closed())


def example_count(condition: Any, args: Any) -> int | None:
    """Return the number of examples in a call with a condition for each, or None if it is not known while tracing."""
    count: int | None = keras.tree.flatten(args)[0].shape[0]
    return condition.shape[0] if count is None else count


def _chosen(condition: Any, a: Any, b: Any) -> Any:
    """For each example a's values where the condition holds, else b's."""
    return ops.where(ops.reshape(condition, (-1,) + (1,) * (len(a.shape) - 1)), a, b)


def with_weights(
    layer: keras.Layer, args: Any, kwargs: Any, weights: Sequence[tuple[keras.Variable, Any]], add_loss: AddLoss
) -> Any:
    """What the layer returns if these of its weights are what is given here."""
    with scopes.AssignmentScope(weights, collect_losses=True) as scope:
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
