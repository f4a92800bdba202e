"""JAX: a branch that costs what it does, on the way back too.

`jax.lax.cond` keeps what either branch would need on the way back, whichever was taken: the weights among it, copied,
and zeros in place of what was not computed. Here a branch has a gradient of its own. What it needs of its inputs it
reads there, and both branches share the memory for the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, Literal


def branch(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """What the one function returns if the condition holds, else what the other does."""
    values: list[Any] = []
    ways = [_Way(function, values) for function in (yes, no)]

    @jax.custom_vjp
    def run(condition: Any, values: list[Any]) -> Any:
        return lax.cond(condition, *ways, values)

    def forward(condition: Any, values: list[Any]) -> Any:
        moving = [i for i, v in enumerate(values) if v.perturbed and jnp.issubdtype(v.value.dtype, jnp.inexact)]
        values = [v.value for v in values]
        passages = [_Passage(way, values, moving) for way in ways]
        slots = _shared(passages)
        outputs, kept = lax.cond(condition.value, *(functools.partial(p.forward, slots) for p in passages), values)
        back = functools.partial(_backward, passages, moving)
        return outputs, jax.tree_util.Partial(back, condition.value, values, kept)

    run.defvjp(forward, lambda back, upstream: back(upstream), symbolic_zeros=True)
    return run(condition, values)


def _backward(
    passages: list[_Passage], moving: list[int], condition: Any, values: list[Any], kept: list[Any], upstream: Any
) -> Any:
    dy = [leaf for leaf in jax.tree.leaves(upstream, is_leaf=_is_zero) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    dy = [jnp.zeros(leaf.shape, leaf.dtype) if _is_zero(leaf) else leaf for leaf in dy]
    found = lax.cond(condition, *(_canonical(p.backward) for p in passages), values, kept, dy)
    gradients: list[Any] = [None] * len(values)
    for i, gradient in zip(moving, found):
        gradients[i] = gradient
    return None, gradients


def _is_zero(leaf: Any) -> bool:
    return isinstance(leaf, SymbolicZero)


class _Way:
    """A branch, as a function of all that either branch takes from outside."""

    def __init__(self, function: Callable[[], Any], values: list[Any]):
        # JAX remembers traces by function object, and what that holds may be another value the next time.
        closed, shapes = jax.make_jaxpr(lambda: function(), return_shape=True)()
        self._jaxpr, self._tree = closed.jaxpr, jax.tree.structure(shapes)
        known = {id(value): i for i, value in enumerate(values)}
        for value in closed.consts:
            if id(value) not in known:
                known[id(value)] = len(values)
                values.append(value)
        self._takes = [known[id(value)] for value in closed.consts]

    def __call__(self, values: Sequence[Any]) -> Any:
        flat = _evaluated(self._jaxpr, [values[i] for i in self._takes], ())
        return jax.tree.unflatten(self._tree, flat)


class _Passage:
    """A way forwards, with what it keeps, and back, given how all but the moving values are."""

    slots: list[int]  # where, among what both ways keep, its own lies

    def __init__(self, way: _Way, values: list[Any], moving: list[int]):
        def run(values: list[Any]) -> Any:
            def of_moving(moved: list[Any]) -> Any:
                now = dict(zip(moving, moved))
                outputs = way([now.get(i, value) for i, value in enumerate(values)])
                return [y for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.inexact)], outputs

            _, pull, outputs = jax.vjp(of_moving, [values[i] for i in moving], has_aux=True)
            needed, self._pull = jax.tree.flatten(pull)
            return outputs, needed

        self._closed, shapes = jax.make_jaxpr(run, return_shape=True)(values)
        self._tree = jax.tree.structure(shapes)
        inputs = {variable: i for i, variable in enumerate(self._closed.jaxpr.invars)}
        needed = self._closed.jaxpr.outvars[len(jax.tree.leaves(shapes[0])) :]
        self._from = [None if isinstance(n, Literal) else inputs.get(n) for n in needed]  # which value it is, if one
        self.kinds = [(n.aval.shape, n.aval.dtype) for n, i in zip(needed, self._from) if i is None]

    def forward(self, slots: list[Any], values: list[Any]) -> Any:
        flat = _evaluated(self._closed.jaxpr, self._closed.consts, values)
        outputs, needed = jax.tree.unflatten(self._tree, flat)
        own = dict(zip(self.slots, (value for value, i in zip(needed, self._from) if i is None)))
        return outputs, [own[i] if i in own else jnp.zeros(*kind) for i, kind in enumerate(slots)]

    def backward(self, values: list[Any], kept: list[Any], dy: list[Any]) -> Any:
        own = iter(self.slots)
        needed = [kept[next(own)] if i is None else values[i] for i in self._from]
        (gradients,) = jax.tree.unflatten(self._pull, needed)(dy)
        return gradients


def _shared(passages: Iterable[_Passage]) -> list[Any]:
    """The shapes and dtypes of what is kept, whichever way is taken; tells each where its own lies."""
    slots: list[Any] = []
    for passage in passages:
        free = list(range(len(slots)))
        passage.slots = []
        for kind in passage.kinds:
            place = next((i for i in free if slots[i] == kind), len(slots))
            if place == len(slots):
                slots.append(kind)
            else:
                free.remove(place)
            passage.slots.append(place)
    return slots


def _canonical(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with convolutions as `_evaluated` computes them."""

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        flat = _evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), flat)

    return run


def _evaluated(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Do what a traced function does, with convolutions that are fast inside of a branch.

    XLA's compiler for CPUs has fast code for convolutions with their axes in one order, and brings others into it, such
    as their gradients, only where they are outside of branches. Within they can be fifty times slower.
    """
    on_cpu = jax.default_backend() == "cpu"
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args)))
    for equation in jaxpr.eqns:
        inputs = [_read(known, atom) for atom in equation.invars]
        if on_cpu and equation.primitive is lax.conv_general_dilated_p:
            outputs = [_convolution(*inputs, **equation.params)]
        else:
            params = equation.primitive.get_bind_params(equation.params)
            functions, params = params if isinstance(params, tuple) else ((), params)  # in older versions of JAX
            with equation.ctx.manager:
                outputs = equation.primitive.bind(*functions, *inputs, **params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        known.update(zip(equation.outvars, outputs))
    return [_read(known, atom) for atom in jaxpr.outvars]


def _read(known: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else known[atom]


def _convolution(x: Any, kernel: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    """A convolution, with the channels last and groups among the channels."""
    (batch, channels, *space), (outward, inward, *window), (y_batch, y_channels, *y_space) = dimension_numbers
    x = jnp.transpose(x, (batch, *space, channels))
    kernel = jnp.transpose(kernel, (*window, inward, outward))
    groups = params["batch_group_count"]
    if groups > 1:
        x = jnp.moveaxis(jnp.reshape(x, (groups, -1, *x.shape[1:])), 0, -2)
        x = jnp.reshape(x, (*x.shape[:-2], -1))
        params = {**params, "batch_group_count": 1, "feature_group_count": groups}
    last, axes = x.ndim - 1, range(1, x.ndim - 1)
    order = lax.ConvDimensionNumbers((0, last, *axes), (last, last - 1, *range(last - 1)), (0, last, *axes))
    y = lax.conv_general_dilated_p.bind(x, kernel, dimension_numbers=order, **params)
    places = {axis: i for i, axis in enumerate((y_batch, *y_space, y_channels))}
    return jnp.transpose(y, [places[axis] for axis in range(y.ndim)])
