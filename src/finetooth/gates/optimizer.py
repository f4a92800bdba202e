"""What optimizers do about closed gates: nothing at all, to the gate's weights and to the state they keep for them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import keras
from keras import ops

from ..backends import backend
from ..errors import GateError, TuningError
from ..keras_internals import marks, scopes
from ..keras_internals import private as keras_private
from ..optimizers.slots import slots_of
from ..optimizers.wrapper import Wrapper


def guard(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Let an optimizer leave the weights behind closed gates alone, and its state for them. Returns it.

    A gate tells by the gradient of a variable of its own, the flag, whether it was open in a step. While all are open
    the optimizer runs as it is. If one is closed it runs for the rest; or, where it would not leave the others alone or
    heads are apart, it runs and all that belongs to a closed gate becomes what it was.
    """
    inner, scaling = optimizer, []
    while hasattr(inner, "inner_optimizer"):
        if isinstance(inner, Wrapper):
            raise TuningError(
                f"{type(inner).__name__} does not know gates. Train a model with gates by its inner optimizer."
            )
        scaling.append(inner)
        inner = inner.inner_optimizer
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise GateError(f"Expected a Keras optimizer; received {inner!r}.")
    for outer in scaling:
        _replace(outer, apply=_apply_scaled, stateless_apply=_stateless_apply_scaled)
    _replace(inner, apply=_apply)
    return optimizer


def running_models(layer: keras.Layer) -> list[keras.Layer]:
    """The models that are calling this layer just now.

    One that runs by `stateless_call`, as in `fit` on JAX, is not called itself, and Keras knows only the layers inside
    of it; it is found on the stack, with the model whose training step this is.
    """
    models = [keras_private.entry_layer(layer)]
    if not scopes.in_stateless_scope():
        return models
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name in ("stateless_call", "train_step"):
            model = frame.f_locals.get("self")
            if isinstance(model, keras.Model) and not any(model is other for other in models):
                models.append(model)
        frame = frame.f_back
    return models


def _replace(optimizer: Any, **methods: Callable[..., None]) -> None:
    """Replace methods of an optimizer, once and for good: without gates it does what it did."""
    if marks.GUARDED in optimizer.__dict__:
        return
    replaced = {name: functools.partial(new, optimizer, getattr(optimizer, name)) for name, new in methods.items()}
    optimizer.__dict__.update({marks.GUARDED: True, **replaced})  # past Keras' tracking on TensorFlow


def _apply_scaled(optimizer: Any, original: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    variables = keras_private.trained_by(optimizer) if trainable_variables is None else list(trainable_variables)
    original(_amplified(grads, variables), trainable_variables)


def _stateless_apply_scaled(optimizer: Any, original: Any, state: Any, grads: Sequence[Any], values: Any) -> Any:
    return original(state, _amplified(grads, keras_private.trained_by(optimizer)), values)


def _amplified(grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """The gradients, with those of flags as large as ones: no scale that they are divided by makes them zeros."""
    is_flag = [g is not None and hasattr(v, marks.FLAG_OF) for g, v in zip(grads, variables)]
    return [ops.sign(g) if flag else g for g, flag in zip(grads, is_flag)]


def _apply(optimizer: Any, original: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    variables = keras_private.trained_by(optimizer) if trainable_variables is None else list(trainable_variables)
    grads = list(grads)
    flags = [i for i, v in enumerate(variables) if hasattr(v, marks.FLAG_OF) and grads[i] is not None]
    masks = _masks([(variables[i], grads[i]) for i in flags])
    for i in flags:
        grads[i] = ops.zeros_like(grads[i])  # so the flag stays as it is, and counts in no norm
    if not masks:
        original(grads, trainable_variables)
        return
    if not optimizer.built:
        with backend.outside_of_graphs(), keras.name_scope(optimizer.name):
            optimizer.build(variables)
    grads = [_zeros(v) if g is None and id(v) in masks else g for g, v in zip(grads, variables)]
    rest = [(g, v) for g, v in zip(grads, variables) if id(v) not in masks and g is not None]

    def step() -> None:
        original(grads, trainable_variables)

    def step_on_the_rest() -> None:
        original([g for g, _ in rest], [v for _, v in rest])

    together = len({id(mask) for mask in masks.values()}) == 1 and not len(next(iter(masks.values())).shape)
    apart = together and rest and _steps_apart(optimizer)
    masked = grads
    if not apart:
        masked = [backend.mask_gradient(g, masks[id(v)]) if id(v) in masks else g for g, v in zip(grads, variables)]

    def step_and_put_back() -> None:
        kept = list(_kept(optimizer, masks))
        original(masked, trainable_variables)
        for variable, value, mask in kept:
            closed = not len(mask.shape) and backend.concrete(mask) is False
            variable.assign(value if closed else ops.where(mask, ops.convert_to_tensor(variable), value))

    all_open = ops.all(ops.stack([ops.all(mask) for mask in masks.values()]))
    everything = [*variables, *optimizer.variables]
    if backend.single_replica():
        backend.assign_in_branch(all_open, step, step_on_the_rest if apart else step_and_put_back, everything)
    else:
        step_and_put_back()


def _steps_apart(optimizer: Any) -> bool:
    """Whether a step on some variables leaves all others, and what is kept for them, alone. Then it saves the work."""
    return backend.single_replica() and not (
        optimizer.use_ema or optimizer.gradient_accumulation_steps or hasattr(optimizer, "optimizers")
    )


def _zeros(variable: Any) -> Any:
    return ops.zeros(variable.shape, variable.dtype)


def _masks(flags: list[tuple[Any, Any]]) -> dict[int, Any]:
    """Where each weight behind a gate that is, or may be, closed is open; by the weight's id."""
    masks: dict[int, Any] = {}
    for flag, gradient in flags:
        gate = getattr(flag, marks.FLAG_OF)()
        opened = gradient > 0  # also where the loss was scaled, or the gate was called twice
        if gate is None or backend.concrete(ops.all(opened)):
            continue
        for variable, mask in gate.masks(opened):
            before = masks.get(id(variable))
            masks[id(variable)] = mask if before is None else ops.logical_and(before, mask)
    return masks


def _kept(optimizer: Any, masks: dict[int, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """The weights and slots behind the masks, with copies of what they hold."""
    slots = [slot for slot in slots_of(optimizer) if id(slot.owner) in masks]
    for variable in keras_private.trained_by(optimizer):
        if id(variable) in masks:
            yield variable, _copy(variable), masks[id(variable)]
    for slot in slots:
        mask = masks[id(slot.owner)]
        if len(mask.shape) and not slot.elementwise:
            raise GateError(
                f"{optimizer.name!r} keeps a {slot.variable.name!r} of shape {slot.variable.shape} for "
                f"{slot.owner.path!r} of shape {slot.owner.shape}, in which heads are not apart. Use an optimizer that "
                "treats each element by itself, such as AdamW, or a gate around the whole layer."
            )
        value = _copy(slot.variable)
        if slot.role == "average":
            # Keras starts an average at the first step, whether or not the gate is open: it is the weight as it is.
            value = ops.where(ops.equal(slot.optimizer.iterations, 0), _copy(slot.owner), value)
        yield slot.variable, value, mask


def _copy(variable: Any) -> Any:
    return ops.stop_gradient(ops.copy(ops.convert_to_tensor(variable)))
