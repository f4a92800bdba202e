"""Training steps on some tokens of a batch of sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from ..backends import backend
from ..errors import BatchError
from ..keras_internals import private as keras_private
from ..keras_internals.hooks import hooked
from ..keras_internals.masks import mask_of
from ..parts.composed import Composed
from .evaluate import losses_of, state_scope
from .keep import KeepRule, ScoredBatch
from .memory import BatchMemory
from .metrics import BlockedMetrics, metrics_blocked

_BY_TOKEN = (keras.layers.Dense, keras.layers.Activation, keras.layers.Softmax)


class TokenSteps:
    """Training steps in which the last layers, and the loss, are computed with gradients for the kept tokens only.

    The layers below need every token, as context of the others, and run once. Their output is scored without
    gradients, and the kept tokens of it go on.
    """

    def __init__(self, model: keras.Model, keep_rule: KeepRule, memory: BatchMemory, tokens: bool | keras.Layer):
        self.model, self.keep_rule, self.memory = model, keep_rule, memory
        self._head = _head_of(model) if tokens is True else [_inside(model, tokens)]

    def score_and_train(self, original: Any, state: Any, data: Any) -> tuple[Any, dict[str, Any]]:
        """Train on the kept tokens, and update the metrics with all.

        Args:
            original: The model's own training step.
            state: The state that JAX gives the step; empty on the other backends.
            data: The batch.

        Returns:
            What the model's own step returns, and what to add to its logs.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        if keras.tree.is_nested(y) or len(y.shape) < 2:
            raise BatchError("Tokens are kept in models with one output, whose targets have an axis of tokens.")
        with state_scope(self.model, state):
            remembered = [variable.value for variable in self.memory.variables]
        step = _TokenStep(self, remembered, x, y, sample_weight)
        with step.hooked(self._head):
            done = original(*state, data)
        return done, step.logs


@dataclass(frozen=True)
class TokenChoice:
    """The tokens that are kept of a batch, with what the loss and the metrics need of the scoring.

    Args:
        indices: The kept tokens, as positions in the flattened batch.
        weights: The factor of each kept token's loss.
        predictions: The head's output for all tokens, without gradients.
        loss: The compiled loss of all tokens, without gradients.
        remembered: The values of the memory's variables after the step.
        logs: What to add to the logs.
    """

    indices: Any
    weights: Any
    predictions: Any
    loss: Any
    remembered: list[Any]
    logs: dict[str, Any]

    def taken(self, values: Any) -> Any:
        """Return the kept tokens of (batch, tokens, ...) as one long sequence."""
        flat = ops.reshape(values, (-1, *values.shape[2:]))
        return ops.take(flat, self.indices, axis=0)[None]


class _TokenStep:
    """One training step: tokens are scored where the head is called, and used where the loss is computed."""

    def __init__(self, steps: TokenSteps, remembered: list[Any], x: Any, y: Any, sample_weight: Any):
        self._model, self._keep_rule, self._memory = steps.model, steps.keep_rule, steps.memory
        self._remembered = remembered
        self._x, self._y, self._sample_weight = x, y, sample_weight
        self._choice: TokenChoice | None = None

    @property
    def logs(self) -> dict[str, Any]:
        return {} if self._choice is None else self._choice.logs

    @contextmanager
    def hooked(self, head: list[keras.Layer]) -> Iterator[None]:
        """Context manager: the model trains on kept tokens. Keras' masks, which are of all tokens, end at the head."""

        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call_head(head, original, args, kwargs)

        def compute_mask(original: Any, *args: Any, **kwargs: Any) -> None:
            return None

        with metrics_blocked(self._model) as metrics, ExitStack() as stack:

            def compute_loss(original: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, **kwargs: Any) -> Any:
                choice = self._checked_choice()
                self._update_metrics(choice, metrics, x, y, sample_weight)
                return original(x, choice.taken(y), y_pred, choice.weights[None], **kwargs)

            stack.enter_context(hooked(head[0], "call", call))
            for layer in head:
                stack.enter_context(hooked(layer, "compute_mask", compute_mask))
            stack.enter_context(hooked(self._model, "compute_loss", compute_loss))
            yield

    def _call_head(self, head: list[keras.Layer], call: Any, args: Any, kwargs: Any) -> Any:
        """Call the head's first layer for the kept tokens."""
        hidden, *more = args
        if isinstance(head[0], keras.layers.ReversibleEmbedding) and not (kwargs.get("reverse") or any(more)):
            return call(*args, **kwargs)  # it looks tokens up; the head is its other direction
        if self._choice is not None or len(hidden.shape) < 3:
            raise BatchError(
                f"Tokens cannot be kept at {head[0].name!r}: it is to be called once in a step, with a vector for each "
                f"token; its input has shape {tuple(hidden.shape)}."
            )
        with backend.no_gradients():
            whole = first = call(ops.stop_gradient(hidden), *more, **kwargs)
            for layer in head[1:]:
                whole = layer(whole)
            predictions = ops.stop_gradient(whole)
        self._choice = choice = self._kept(predictions, mask_of(hidden))
        if _is_product(head[0]):
            weights = [ops.convert_to_tensor(weight) for weight in _weights(head[0])]
            return _known_product(ops.stop_gradient(choice.taken(first)), choice.taken(hidden), *weights)
        return call(choice.taken(hidden), *more, **kwargs)

    def _kept(self, predictions: Any, mask: Any) -> TokenChoice:
        """Score all tokens and keep some of those that are not masked."""
        loss, losses = self._losses(predictions)
        batch = ScoredBatch(
            self._x, self._y, self._sample_weight, losses, predictions, lambda others: self._losses(others)[1]
        )
        scores = ops.stop_gradient(self._keep_rule.scores(batch))
        valid = ops.ones_like(scores, dtype="bool") if mask is None else ops.cast(mask, "bool")
        token_weights = self._token_weights(scores)
        if token_weights is not None:
            valid = ops.logical_and(valid, ops.not_equal(token_weights, 0))
        flat = ops.reshape(ops.where(valid, scores, float("nan")), (-1,))
        counted = ops.reshape(ops.where(valid, scores, 0.0), (-1,))  # masked tokens are not counted as left out
        number = flat.shape[0] if flat.shape[0] is not None else ops.shape(flat)[0]
        k, memory = self._keep_rule.count(number), self._memory
        # On JAX a model's call cannot assign the memory's variables: it is given their values, assigned with the loss.
        with keras.StatelessScope(state_mapping=zip(memory.variables, self._remembered)) as scope:
            indices, importance = self._keep_rule.kept(flat, k, memory, batch)
            memory.note_counts(seen=number, kept=k)
            memory.note_kept(flat, indices, among=counted)
            logs = memory.logs()
        remembered = [scope.get_current_value(variable) for variable in memory.variables]
        weights = _first_only(flat, k) * (1.0 if importance is None else importance)
        if token_weights is not None:
            weights = weights * ops.take(ops.reshape(token_weights, (-1,)), indices, axis=0)
        return TokenChoice(indices, weights, predictions, loss, remembered, logs)

    def _losses(self, predictions: Any) -> tuple[Any, Any]:
        loss, (losses,) = losses_of(self._model, self._y, predictions, self._sample_weight)
        if len(losses.shape) != 2:
            raise BatchError(f"Expected one loss per token, shape (batch, tokens); received {tuple(losses.shape)}.")
        return loss, losses

    def _token_weights(self, scores: Any) -> Any:
        if self._sample_weight is None:
            return None
        weights = ops.cast(self._sample_weight, "float32")
        return ops.broadcast_to(weights if len(weights.shape) == 2 else weights[:, None], ops.shape(scores))

    def _checked_choice(self) -> TokenChoice:
        if self._choice is None:
            raise BatchError("The layer that tokens are kept at was not called. Give the one that makes the output.")
        return self._choice

    def _update_metrics(self, choice: TokenChoice, metrics: BlockedMetrics, x: Any, y: Any, sample_weight: Any) -> None:
        """Assign what is remembered, and update the metrics with all tokens."""
        with backend.no_gradients():
            for variable, value in zip(self._memory.variables, choice.remembered):
                variable.assign(value)
            added = [ops.sum(loss) for loss in self._model.losses]
            metrics.update(sum(added, choice.loss), x, y, choice.predictions, sample_weight)


def _first_only(flat: Any, k: Any) -> Any:
    """Return weights of mean 1 for k kept tokens: where fewer scores are finite, the repeated tokens count once."""
    finite = ops.sum(ops.cast(ops.isfinite(flat), "int32"))
    share = ops.cast(k, "float32") / ops.cast(ops.clip(finite, 1, k), "float32")
    return ops.where(ops.arange(k, dtype="int32") < finite, share, 0.0)


def _is_product(layer: keras.Layer) -> bool:
    """Return whether the layer adds a bias to a product with its kernel and does nothing else."""
    return (
        type(layer) is keras.layers.Dense
        and layer.activation is keras.activations.linear
        and not (layer.lora_enabled or layer.quantization_mode)
        and all(v.trainable and not isinstance(v, Composed) for v in _weights(layer))
    )


def _weights(layer: keras.layers.Dense) -> list[keras.Variable]:
    return [layer.kernel] if layer.bias is None else [layer.kernel, layer.bias]


@ops.custom_gradient
def _known_product(y: Any, x: Any, kernel: Any, bias: Any = None) -> Any:
    """Return y, the output of a Dense layer for x, which is known already. Only the gradients are computed."""

    def grad(*args: Any, upstream: Any = None) -> Any:
        dy = args[0] if upstream is None else upstream
        flat_x, flat_dy = backend.as_matrix(x), backend.as_matrix(dy)
        of_kernel = backend.matmul(flat_x, flat_dy, transpose_a=True)
        of_x = ops.reshape(backend.matmul(flat_dy, kernel, transpose_b=True), ops.shape(x))
        of_bias = () if bias is None else (ops.sum(flat_dy, axis=0),)
        return dy, of_x, of_kernel, *of_bias  # y is a constant here; its gradient is never used

    return y, grad


def _inside(model: keras.Model, layer: Any) -> keras.Layer:
    if not any(layer is inner for inner in keras_private.layers_of(model)):
        raise BatchError(f"tokens is True or a layer of the model; received {layer!r}.")
    return layer


def _head_of(model: keras.Model) -> list[keras.Layer]:
    """Return the layers that end the model and treat each token by itself, first to last."""
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
