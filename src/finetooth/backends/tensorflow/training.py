"""TensorFlow: what surrounds a training step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from ...keras_internals.hooks import hooked
from .links import INTEGERS, Link, thread
from .writes import in_xla


@contextmanager
def stepping(optimizer: keras.optimizers.Optimizer, links: Sequence[Link]) -> Iterator[None]:
    """Context manager: the optimizer's steps begin when all gradients are there, so that no write copies a base."""

    def apply(original: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not optimizer.built:  # outside of the dependencies, where variables cannot be made
                with keras.name_scope(optimizer.name, caller=optimizer):
                    optimizer.build(trainable_variables)
        given = [gradient for gradient in grads if gradient is not None]
        before = thread.zero, thread.in_step
        thread.zero, thread.in_step = (_zero_known_after(given), False) if in_xla() else (None, True)
        try:
            with nullcontext() if tf.executing_eagerly() or in_xla() else tf.control_dependencies(given):
                return original(grads, trainable_variables)
        finally:
            thread.zero, thread.in_step = before

    with hooked(optimizer, "apply", apply):
        yield


def _zero_known_after(gradients: Sequence[Any]) -> tf.Tensor | None:
    """Zero, computed from an element of each gradient in a way that XLA's optimizations do not see through.

    XLA updates a variable in place only where all readers of the old value are known to come first, and it knows that
    by data dependencies alone: it has no control dependencies, and takes optimization barriers out before it decides.
    """
    bits = []
    for gradient in gradients:
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)
        flat = tf.reshape(values, [-1])
        if flat.shape[0] and flat.dtype.size in INTEGERS:
            bits.append(tf.bitcast(flat[0], INTEGERS[flat.dtype.size]))
    zeros = [tf.cast(tf.equal(tf.bitwise.bitwise_or(b, tf.ones_like(b)), 0), tf.int32) for b in bits]
    return tf.add_n(zeros) if zeros else None


_CONTROL_FLOW = {"CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph"}


def graph() -> Any:
    if tf.executing_eagerly():
        return None
    traced = tf.compat.v1.get_default_graph()
    while type(traced).__name__ in _CONTROL_FLOW:  # whose bodies may use what is outside of them
        traced = traced.outer_graph
    return traced


def forget_traces(layers: Collection[keras.Layer]) -> None:
    for layer in layers:
        for kind in type(layer).__mro__:
            for method in vars(kind).values():
                if isinstance(method, tf.types.experimental.PolymorphicFunction):
                    # TensorFlow has no public way to drop what a decorated method has traced for one object.
                    getattr(method, "_descriptor_cache", {}).pop(layer, None)


def creation_scope(model: keras.Model) -> AbstractContextManager[Any]:
    return model.distribute_strategy.scope()


def outside_of_graphs() -> AbstractContextManager[Any]:
    return tf.init_scope()
