"""Whether a frozen prefix may be computed once and kept: would training compute the same bits, in any batch?

Nothing is assumed of a layer by its class. A few examples are run as in training, in a scope where no variable moves,
and what the layers draw, assign, add to the loss and return is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np

from ..errors import TuningError
from ..keras_internals import private as keras_private
from ..keras_internals.hooks import hooked
from ..keras_internals.masks import mask_of
from ..regions import bits


def check(prefix: keras.Model, makers: Sequence[Any], trained: Sequence[keras.Variable], x: Any) -> None:
    """Refuse a prefix that training would compute otherwise, naming the layer and the reason.

    Args:
        prefix: A model whose outputs are those of every call in the prefix, inputs first.
        makers: The layers or operations that make these outputs.
        trained: What is being trained: the prefix must not depend on it.
        x: A few examples.
    """
    losses: list[str] = []
    other_weights = [(v, keras.ops.stop_gradient(keras.ops.add(v, 1))) for v in trained]
    with _modules_kept(prefix), _losses_noted(prefix, losses):
        in_training, scope = _run(prefix, x, True, other_weights)
        plain, _ = _run(prefix, x, False)
    if losses:
        raise _error(losses[0], "adds to the loss (add_loss, or an activity regularizer), which features do not carry")
    _check_updates(prefix, scope)
    for maker, a, b in zip(makers, plain, in_training):
        if bits.differing(a, b).any():
            other = "computes in training something else than at inference, or from weights being trained"
            # PyTorch's own dropout, which Keras prefers there, does not draw from the layer's seeds.
            raise _error(maker.name, "draws random numbers in training" if _holds_seeds(maker) else other)
    count = len(keras.tree.flatten(x)[0])
    for example in (0, count - 1):
        alone, _ = _run(prefix, rows(x, [example] * count), False)
        for maker, a, b in zip(makers, plain, alone):
            of_examples = a.ndim > 0 and len(a) == count
            if bits.differing(*((a[example], b[example]) if of_examples else (a, b))).any():
                raise _error(maker.name, "mixes the examples of a batch: what it makes of one depends on the others")


def masked(lower: keras.Model, x: Any) -> list[bool]:
    """To which outputs of the model Keras attaches a mask."""
    with keras.StatelessScope():
        return [mask_of(tensor) is not None for tensor in keras.tree.flatten(lower(x))]


def rows(x: Any, indices: Sequence[int]) -> Any:
    """Some of the examples, of arrays or tensors in any structure."""
    take = np.array(indices)
    return keras.tree.map_structure(lambda a: a[take] if isinstance(a, np.ndarray) else keras.ops.take(a, take, 0), x)


def _holds_seeds(operation: Any) -> bool:
    return isinstance(operation, keras.Layer) and len(operation.variables) > len(operation.weights)


def _check_updates(prefix: keras.Model, scope: keras.StatelessScope) -> None:
    for layer in reversed(keras_private.layers_of(prefix)):  # inner ones first: they know best
        weights = {id(v) for v in layer.weights}
        for variable in layer.variables:
            if scope.get_current_value(variable) is not None:
                if id(variable) in weights:
                    raise _error(layer.name, f"updates its {variable.name!r} in training")
                raise _error(layer.name, "draws random numbers in training")


def _error(name: str, reason: str) -> TuningError:
    return TuningError(
        f"Layer {name!r} {reason}, so the frozen prefix that it is in cannot be computed once and kept. "
        "Select something below it, or train the whole model with fit."
    )


def _run(model: keras.Model, x: Any, training: bool, state: Sequence[Any] = ()) -> tuple[list[np.ndarray], Any]:
    """The outputs, without a trace on any variable, and what would have been assigned."""
    with keras.StatelessScope(state) as scope:
        outputs = keras.tree.flatten(model(x, training=training))
    return [np.asarray(keras.ops.convert_to_numpy(output)) for output in outputs], scope


@contextmanager
def _losses_noted(model: keras.Model, names: list[str]) -> Iterator[None]:
    """While open, a layer that adds to the loss is noted instead."""
    with ExitStack() as stack:
        for layer in keras_private.layers_of(model):
            stack.enter_context(hooked(layer, "add_loss", lambda _, loss, name=layer.name: names.append(name)))
        yield


@contextmanager
def _modules_kept(model: keras.Model) -> Iterator[None]:
    """PyTorch modules have state that Keras does not know of, which moves in training: put it back."""
    kept: list[tuple[keras.Layer, dict[str, Any]]] = []
    for layer in keras_private.layers_of(model):
        if isinstance(layer, keras.layers.TorchModuleWrapper):
            kept.append((layer, {}))
            layer.save_own_variables(kept[-1][1])
    try:
        yield
    finally:
        for layer, state in kept:
            layer.load_own_variables(state)
