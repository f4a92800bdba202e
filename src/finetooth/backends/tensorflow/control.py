"""TensorFlow: branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


def concrete(condition: tf.Tensor) -> bool | None:
    return bool(condition) if tf.executing_eagerly() else None


def single_replica() -> bool:
    return tf.distribute.get_strategy().num_replicas_in_sync == 1


def assign_in_branch(
    condition: tf.Tensor, yes: Callable[[], Any], no: Callable[[], Any], variables: Sequence[keras.Variable]
) -> None:
    tf.cond(condition, lambda: _done(yes), lambda: _done(no))


def _done(function: Callable[[], Any]) -> tf.Operation:
    function()
    return tf.no_op()
