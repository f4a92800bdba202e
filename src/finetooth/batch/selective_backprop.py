"""selective_backprop: train on the examples, or the tokens, of each batch that a rule keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import keras
from keras import ops

from ..backends import backend
from ..backends.failed_steps import guarded_steps
from ..errors import BatchError
from ..keras_internals import private as keras_private
from ..keras_internals.hooks import hooked
from ..schedule import Schedule
from .evaluate import state_scope
from .example_scores import Stale
from .examples import ExampleSteps
from .keep import KeepRule, size_of
from .memory import BatchMemory
from .metrics import state_with_metrics
from .rules import hardest
from .tokens import TokenSteps


def selective_backprop(
    model: keras.Model,
    keep: float,
    rule: Callable[..., Any] = hardest,
    *,
    score: Callable[..., Any] | Stale | None = None,
    when: Schedule | Callable[[Any], Any] | None = None,
    tokens: bool | keras.Layer = False,
    seed: int | None = None,
) -> SelectiveBackprop:
    """From here until `stop()`, `fit` trains the model on a share of each batch, chosen by its losses.

    A batch is scored without gradients, and without a trace on weights, statistics and seeds; then the model's own
    training step gets the kept examples only, so that time is saved. The loss and all metrics are those of the whole
    batch, from the scoring. `logs` have `kept_fraction`, `kept_threshold` (the lowest score kept) and `nan_losses`
    (examples that were left out since their loss is not finite).

    Args:
        model: A compiled or yet to be compiled model; it may be tuned.
        keep: The share of each batch to train on, above 0 and at most 1.
        rule: Which to keep: a function of the scores and their number, as in `ft.batch`. It is told in addition what it
            names among `seed`, `history` (recent scores), `labels`, `predictions`, `x` and `y`. A rule that returns
            indices and weights has the losses of those kept multiplied by these.
        score: What decides, where it is not the loss: a function of what it names among `losses`, `predictions`, `x`,
            `y`, `sample_weight` and `losses_of` (from predictions to losses). `ft.batch.Stale` keeps scores for some
            steps.
        when: In which steps examples are chosen: `ft.Schedule`, or any function from the optimizer's step to a boolean.
            In all others the model trains on whole batches. Default: always.
        tokens: Choose tokens instead of examples: True for a model whose output is made by a Dense layer, or the layer
            from which on each token is computed by itself.
        seed: For rules that draw random numbers.
    """
    return SelectiveBackprop(model, KeepRule(keep, rule, _plain(score)), score, when, tokens, seed)


class SelectiveBackprop:
    """A model that trains on kept examples; made by `selective_backprop`. In a `with` block it stops at the end."""

    def __init__(self, model: keras.Model, keep_rule: KeepRule, score: Any, when: Any, tokens: Any, seed: int | None):
        if not isinstance(model, keras.Model):
            raise BatchError(f"Expected a Keras model; received {model!r}.")
        if any(isinstance(metric, BatchMemory) for metric in keras_private.metrics_in(model)):
            raise BatchError(
                f"Model {model.name!r} trains by selective_backprop already. Call stop() on what that returned."
            )
        if when is not None and not callable(when):
            raise BatchError(f"when is a Schedule or a function of the step; received {when!r}.")
        self.model = model
        self._stale = score if isinstance(score, Stale) else None
        self._when = None if when is None or when == Schedule() else when
        with backend.creation_scope(model):
            memory = BatchMemory(seed, self._stale.examples if self._stale else 0)
        steps: Any = TokenSteps(model, keep_rule, memory, tokens) if tokens else ExampleSteps(model, keep_rule, memory)
        if tokens and self._stale:
            raise BatchError("Stale scores are of examples; they cannot be kept for tokens.")
        self._steps = steps
        self._memory = memory
        self._undo = ExitStack()
        metrics = keras_private.metrics_in(model)
        metrics.append(memory)
        self._undo.callback(metrics.remove, memory)
        self._undo.enter_context(hooked(model, "train_step", self._step))
        self._undo.enter_context(guarded_steps(model, "train"))
        self._undo.callback(self._drop_function)
        self._drop_function()
        if memory not in model.metrics:
            self._undo.close()
            raise BatchError(
                f"Model {model.name!r} has a list of metrics of its own. Let it include those of super().metrics: what "
                "is remembered between steps is kept there."
            )

    def stop(self) -> None:
        """Train on whole batches again. Nothing is left behind in the model."""
        self._undo.close()

    def __enter__(self) -> SelectiveBackprop:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _drop_function(self) -> None:
        self.model.train_function = None

    def _step(self, original: Any, *given: Any) -> Any:
        """One training step. On JAX it is given the state as well as the data, and returns it after the logs."""
        *state, data = given
        with backend.outside_of_graphs():
            keras_private.build_for(self.model, data)
        _check(self.model, data)

        def whole() -> Any:
            with state_scope(self.model, state) as scope:
                self._memory.note_counts(seen=size_of(data), kept=size_of(data))
                logs = self._memory.logs()
            return self._with_logs(original(*state_with_metrics(self.model, state, scope), data), logs)

        def kept() -> Any:
            if self._stale is None:
                return self._with_logs(*self._steps.score_and_train(original, state, data))
            return self._from_stale_scores(self._stale, original, state, data)

        if self._steps.keep_rule.share == 1.0:
            return whole()
        if self._when is None:
            return kept()
        with state_scope(self.model, state):
            selective = ops.cast(self._when(self.model.optimizer.iterations), "bool")
        return backend.branch(selective, kept, whole)

    def _from_stale_scores(self, stale: Stale, original: Any, state: Any, data: Any) -> Any:
        """Score the batch only if a score in it is too old."""
        x, *_ = keras.utils.unpack_x_y_sample_weight(data)
        ids = stale.of(x)
        with state_scope(self.model, state):
            step = ops.cast(self.model.optimizer.iterations, "int32")
            age = step - ops.take(self._memory.scored_at.value, ids)
            known = ops.take(self._memory.scores.value, ids)
            young = ops.all(age < stale.steps)
        return backend.branch(
            young,
            lambda: self._with_logs(*self._steps.train_by_scores(known, original, state, data)),
            lambda: self._with_logs(*self._steps.score_and_train(original, state, data, remember=(ids, step))),
        )

    @staticmethod
    def _with_logs(done: Any, logs: dict[str, Any]) -> Any:
        if isinstance(done, tuple):
            own, state = done
            return {**own, **logs}, state
        return {**done, **logs}


def _plain(score: Any) -> Any:
    return score.score if isinstance(score, Stale) else score


def _check(model: keras.Model, data: Any) -> None:
    if any(hasattr(leaf, "row_splits") for leaf in keras.tree.flatten(data) if leaf is not None):
        raise BatchError("Examples of ragged tensors cannot be kept apart. Pad them, for instance with to_tensor().")
    _, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    if y is None:
        raise BatchError("The batch has no targets, so that its examples have no losses of their own.")
