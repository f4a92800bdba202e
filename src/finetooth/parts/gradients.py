"""Gradients for some variables and parts of variables, several times from one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from ..backends import backend
from ..errors import PartError
from .part import Part, check_trainable


class Pass:
    """One run of a function that returns a loss, from which gradients for any subset of `of` can be had.

    `of` is a variable, a `Part` or any structure of them. The function reads variables as they are, or a part as
    `part.merged()`; then nothing of the whole variable's size is computed for its gradient. It may return more than the
    loss, as a tuple `(loss, outputs)`.

    `gradients(some)` computes what leads to these and no more, without running the function again. A part's gradient
    has its shape. Where the loss does not depend on something, its gradient is zero.

    >>> import keras, numpy as np, finetooth as ft
    >>> w, b = keras.Variable(np.ones((2, 2), "float32")), keras.Variable(np.zeros(2, "float32"))
    >>> column = ft.Part(w, np.s_[:, 0])
    >>> run = ft.Pass(lambda: keras.ops.sum(w * w + b), [column, b])
    >>> float(run.loss), np.array(run.gradients(column)).tolist(), np.array(run.gradients(b)).tolist()
    (4.0, [2.0, 2.0], [2.0, 2.0])
    """

    def __init__(self, function: Callable[[], Any], of: Any):
        items = {id(item): item for item in keras.tree.flatten(of)}
        self._items = items  # held, so that an id stays whose it is
        sources: list[Any] = []
        self._positions: dict[int, list[int]] = {}
        for item in items.values():
            mine = [item.base, item.variable] if isinstance(item, Part) else [_checked(item)]
            self._positions[id(item)] = [_position(sources, source) for source in mine]
        self._sources = sources
        self.loss, self.outputs, self._gradients = backend.forward_with_gradients(lambda: _loss_of(function()), sources)

    def gradients(self, of: Any) -> Any:
        """The gradients for some of what the pass was made for, in the same structure."""
        items = keras.tree.flatten(of)
        for item in items:
            if id(item) not in self._items:
                raise PartError(
                    f"{item!r:.200} is not among what this pass was made for. Name it when you make a Pass."
                )
        chosen = sorted({position for item in items for position in self._positions[id(item)]})
        found = dict(zip(chosen, self._gradients(chosen)))
        return keras.tree.pack_sequence_as(of, [self._gradient(item, found) for item in items])

    def _gradient(self, item: Any, found: dict[int, Any]) -> Any:
        gradients = [found[position] for position in self._positions[id(item)]]
        if isinstance(item, Part):
            whole, own = gradients
            of_whole = None if whole is None else keras.ops.cast(item.gather(whole), item.variable.dtype)
            gradients = [gradient for gradient in (of_whole, own) if gradient is not None]
            return sum(gradients[1:], gradients[0]) if gradients else keras.ops.zeros(item.shape, item.variable.dtype)
        (gradient,) = gradients
        return keras.ops.zeros(item.shape, item.dtype) if gradient is None else gradient


def gradients(function: Callable[[], Any], of: Any) -> tuple[Any, Any]:
    """The loss that the function returns, and its gradients for `of`: a variable, a `Part` or any structure of them.

    See `Pass`, which is one forward pass from which further subsets can be had.
    """
    run = Pass(function, of)
    return run.loss, run.gradients(of)


def _checked(variable: Any) -> Any:
    if not isinstance(variable, keras.Variable) and not backend.is_variable(variable):
        raise PartError(f"Expected a variable or a Part; received {variable!r:.200} of type {type(variable).__name__}.")
    if backend.is_array(variable):
        raise PartError("An array has no gradient of its own here. Use a keras.Variable, or jax.grad.")
    check_trainable(variable, getattr(variable, "path", None) or getattr(variable, "name", None) or "variable")
    return variable


def _position(sources: list[Any], source: Any) -> int:
    """Where the source is in the list, to which it is added if it is new."""
    for position, known in enumerate(sources):
        if known is source:
            return position
    sources.append(source)
    return len(sources) - 1


def _loss_of(returned: Any) -> tuple[Any, Any]:
    loss, outputs = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not hasattr(loss, "shape") or tuple(loss.shape) != ():
        raise PartError(f"The function must return a scalar loss, or (loss, outputs); received {loss!r:.200}.")
    return loss, outputs
