"""Training steps on some tokens of a batch of sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
from keras import ops

from ..backends import backend
from ..errors import BatchError
from ..keras_internals import private as keras_private
from ..keras_internals.hooks import hooked
from ..keras_internals.masks import mask_of
from . import evaluate as scoring
from .keep import Chooser
from .memory import Ledger

_BY_TOKEN = (keras.layers.Dense, keras.layers.Activation, keras.layers.Softmax)


class TokenSteps:
    """Steps in which the last layers, and the loss, are computed with gradients for the kept tokens only.

    The layers below need every token, as context of the others, and run once. What they make is scored without
    gradients, and the kept tokens of it go on.
    """

    def __init__(self, model: keras.Model, chooser: Chooser, ledger: Ledger, tokens: bool | keras.Layer):
        self.model, self.chooser, self.ledger = model, chooser, ledger
        self._head = _head_of(model) if tokens is True else [_inside(model, tokens)]

    def scored(self, original: Any, state: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        """A step on the kept tokens. The metrics are of all."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        if keras.tree.is_nested(y) or len(y.shape) < 2:
            raise BatchError("Tokens are chosen in models with one output, whose targets have an axis of tokens.")
        with scoring.held(self.model, state):
            before = [variable.value for variable in self.ledger.variables]
        choice = _Choice(self, before, {"x": x, "y": y, "sample_weight": sample_weight})
        with choice.hooked(self._head):
            done = original(*state, data)
        return done, choice.logs


class _Choice:
    """What is kept of one batch: chosen where the head is called, used where the loss is computed."""

    def __init__(self, steps: TokenSteps, before: list[Any], known: dict[str, Any]):
        self._steps, self._before, self._known = steps, before, known
        self._predictions: Any = None
        self.logs: dict[str, Any] = {}

    @contextmanager
    def hooked(self, head: list[keras.Layer]) -> Iterator[None]:
        """While open, the model trains on what is chosen. Keras' masks, which are of all tokens, end here."""
        model = self._steps.model
        with scoring.metrics_kept(model) as self._metrics, ExitStack() as stack:
            stack.enter_context(
                hooked(head[0], "call", lambda call, *args, **kwargs: self._call(head, call, args, kwargs))
            )
            for layer in head:
                stack.enter_context(hooked(layer, "compute_mask", lambda original, *args, **kwargs: None))
            stack.enter_context(hooked(model, "compute_loss", self._compute_loss))
            yield

    def _call(self, head: list[keras.Layer], call: Any, args: Any, kwargs: Any) -> Any:
        """The head's first layer, for the kept tokens."""
        hidden, *more = args
        if isinstance(head[0], keras.layers.ReversibleEmbedding) and not (kwargs.get("reverse") or any(more)):
            return call(*args, **kwargs)  # it looks tokens up; the head is its other direction
        if self._predictions is not None or len(hidden.shape) < 3:
            raise BatchError(
                f"{head[0].name!r} cannot choose tokens: it is to be called once in a step, with a vector for each "
                f"token; its input has shape {tuple(hidden.shape)}."
            )
        with backend.aside():
            whole = first = call(ops.stop_gradient(hidden), *more, **kwargs)
            for layer in head[1:]:
                whole = layer(whole)
            self._predictions = ops.stop_gradient(whole)
        self._choose(mask_of(hidden))
        if _is_product(head[0]):
            weights = [ops.convert_to_tensor(weight) for weight in _weights(head[0])]
            return _known_product(ops.stop_gradient(self._taken(first)), self._taken(hidden), *weights)
        return call(self._taken(hidden), *more, **kwargs)

    def _choose(self, mask: Any) -> None:
        steps, known = self._steps, self._known
        losses_of = lambda predictions: self._losses(predictions)[1]  # noqa: E731
        self._loss, losses = self._losses(self._predictions)
        known = {**known, "losses": losses, "predictions": self._predictions, "losses_of": losses_of}
        scores = ops.stop_gradient(steps.chooser.scores(known))
        valid = ops.ones_like(scores, dtype="bool") if mask is None else ops.cast(mask, "bool")
        self._weights = self._token_weights(scores)
        if self._weights is not None:
            valid = ops.logical_and(valid, ops.not_equal(self._weights, 0))
        flat = ops.reshape(ops.where(valid, scores, float("nan")), (-1,))
        counted = ops.reshape(ops.where(valid, scores, 0.0), (-1,))  # tokens that do not count are not left out
        number = flat.shape[0] if flat.shape[0] is not None else ops.shape(flat)[0]
        self._count = k = steps.chooser.count(number)
        # Inside a model's call the ledger's variables are not at hand on JAX: they are given, and assigned later.
        with keras.StatelessScope(state_mapping=zip(steps.ledger.variables, self._before)) as scope:
            self._indices, importance = steps.chooser.choose(flat, k, steps.ledger, known)
            steps.ledger.note(seen=number, kept=k)
            steps.ledger.note_choice(flat, self._indices, among=counted)
            self.logs = steps.ledger.logs()
        self._after = [scope.get_current_value(variable) for variable in steps.ledger.variables]
        finite = ops.sum(ops.cast(ops.isfinite(flat), "int32"))
        share = ops.cast(k, "float32") / ops.cast(ops.clip(finite, 1, k), "float32")
        first = ops.arange(k, dtype="int32") < finite  # where there are too few they are repeated, and count once
        self._normalised = ops.where(first, share, 0.0) * (1.0 if importance is None else importance)

    def _losses(self, predictions: Any) -> tuple[Any, Any]:
        loss, (losses,) = scoring.losses_of(
            self._steps.model, self._known["y"], predictions, self._known["sample_weight"]
        )
        if len(losses.shape) != 2:
            raise BatchError(f"Expected one loss per token, shape (batch, tokens); received {tuple(losses.shape)}.")
        return loss, losses

    def _token_weights(self, scores: Any) -> Any:
        weights = self._known["sample_weight"]
        if weights is None:
            return None
        weights = ops.cast(weights, "float32")
        return ops.broadcast_to(weights if len(weights.shape) == 2 else weights[:, None], ops.shape(scores))

    def _taken(self, values: Any) -> Any:
        """The kept tokens of (batch, tokens, ...) as one long sequence."""
        flat = ops.reshape(values, (-1, *values.shape[2:]))
        return ops.take(flat, self._indices, axis=0)[None]

    def _compute_loss(self, original: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, **kwargs: Any) -> Any:
        """The metrics of all tokens, and the loss of those kept."""
        if self._predictions is None:
            raise BatchError("The layer that tokens are chosen at was not called. Give the one that makes the output.")
        model = self._steps.model
        with backend.aside():
            for variable, value in zip(self._steps.ledger.variables, self._after):
                variable.assign(value)
            more = [ops.sum(loss) for loss in model.losses]
            self._metrics.update(sum(more, self._loss), x, y, self._predictions, sample_weight)
        weights = self._normalised[None]
        if self._weights is not None:
            weights = weights * self._taken(self._weights)
        return original(x, self._taken(y), y_pred, weights, **kwargs)


def _is_product(layer: keras.Layer) -> bool:
    """Whether the layer adds a bias to a product with its kernel and does nothing else."""
    return (
        type(layer) is keras.layers.Dense
        and layer.activation is keras.activations.linear
        and not (layer.lora_enabled or layer.quantization_mode)
        and all(v.trainable and not hasattr(v, keras_private.COMPOSED) for v in _weights(layer))
    )


def _weights(layer: keras.layers.Dense) -> list[keras.Variable]:
    return [layer.kernel] if layer.bias is None else [layer.kernel, layer.bias]


@ops.custom_gradient
def _known_product(y: Any, x: Any, kernel: Any, bias: Any = None) -> Any:
    """y, which is what a Dense layer has made of x already: only the gradients are computed."""

    def grad(*args: Any, upstream: Any = None) -> Any:
        dy = args[0] if upstream is None else upstream
        flat_x, flat_dy = backend.as_matrix(x), backend.as_matrix(dy)
        of_kernel = backend.matmul(flat_x, flat_dy, transpose_a=True)
        of_x = ops.reshape(backend.matmul(flat_dy, kernel, transpose_b=True), ops.shape(x))
        of_bias = () if bias is None else (ops.sum(flat_dy, axis=0),)
        return dy, of_x, of_kernel, *of_bias  # the first is anything: nobody asks for y's own

    return y, grad


def _inside(model: keras.Model, layer: Any) -> keras.Layer:
    if not any(layer is inner for inner in keras_private.layers_of(model)):
        raise BatchError(f"tokens is True or a layer of the model; received {layer!r}.")
    return layer


def _head_of(model: keras.Model) -> list[keras.Layer]:
    """The layers that end the model and treat each token by itself, first to last."""
    calls = keras_private.calls_of(model) or []
    head: list[keras.Layer] = []
    wanted = model.outputs[0] if calls and len(model.outputs) == 1 else None
    while wanted is not None:
        (call,) = [call for call in calls if any(tensor is wanted for tensor in call.output_tensors)]
        uses = sum(any(tensor is wanted for tensor in other.input_tensors) for other in calls)
        again = sum(other.operation is call.operation for other in calls) > 1
        if not isinstance(call.operation, _BY_TOKEN) or again or uses > (1 if head else 0):
            break
        head.insert(0, call.operation)
        (wanted,) = call.input_tensors
    if not any(isinstance(layer, keras.layers.Dense) for layer in head):
        raise BatchError(
            f"Model {model.name!r} does not end in Dense layers, called once. Give the layer from which on each token "
            "is computed by itself: tokens=model.get_layer(...)."
        )
    return head
