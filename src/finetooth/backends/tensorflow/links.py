"""TensorFlow: keep a base variable and its part in step.

A base variable holds the merged values at all times. Whoever assigns the part, by any method of the `tf.Variable`, has
its region of the base written too, in place; whoever assigns the base has the part follow. So compiled functions that
read the base, made at any time by anybody, see the merged values. Only a raw op on a variable's handle goes unnoticed
until the next assignment.

A write in place copies the whole variable if a tensor that was read of it is still needed. Inside of a training step it
is therefore ordered after the gradients (`stepping`). That is for speed alone: values are right in any order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ...errors import TuningError
from ...keras_internals import private as keras_private
from ...keras_internals import scopes
from ...keras_internals.hooks import hooked
from ..contract import LinkedPart
from .tensors import replaced
from .writes import in_xla, share_reads, write_in_place

if TYPE_CHECKING:
    from ..tensor_region import TensorRegion

# The methods of a tf.Variable that change it. Keras' optimizers and Keras' variables both end in one of them.
_WRITES = (
    "assign",
    "assign_add",
    "assign_sub",
    "batch_scatter_update",
    "scatter_add",
    "scatter_div",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_nd_add",
    "scatter_nd_max",
    "scatter_nd_min",
    "scatter_nd_sub",
    "scatter_nd_update",
    "scatter_sub",
    "scatter_update",
    "_strided_slice_assign",
    "_restore_from_tensors",
)
_MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
INTEGERS = {2: tf.int16, 4: tf.int32, 8: tf.int64}


class _Thread(threading.local):
    """What the running thread is doing: hooks run in the thread that assigns."""

    following = False  # a link writes one of its variables: the other side must not answer
    in_step = False  # a training step that Keras compiles, and not for XLA
    zero: tf.Tensor | None = None  # in XLA: an integer that is zero, known only when all gradients are


thread = _Thread()


class _Pair:
    """The native variables of a base and its part, on one device."""

    def __init__(self, region: TensorRegion, base: tf.Variable, compact: tf.Variable):
        self._region, self._base, self._compact = region, base, compact

    def write_base(self) -> None:
        with _following(), tf.device(self._base.device):
            value = tf.cast(self._compact.read_value(), self._base.dtype)
            if self._region.is_whole:
                self._base.assign(value, read_value=False)
            elif in_xla():
                if thread.zero is not None:
                    value = _after(thread.zero, value)
                self._base.assign(replaced(self._region, self._base.read_value(), value), read_value=False)
            else:
                write_in_place(self._base, self._region, value)
                if tf.executing_eagerly() or thread.in_step:
                    share_reads(self._base)

    def write_part(self) -> None:
        with _following(), tf.device(self._base.device):
            value = self._region.gather(self._base.read_value())
            self._compact.assign(tf.cast(value, self._compact.dtype), read_value=False)

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in _WRITES:
                stack.enter_context(hooked(self._compact, name, _then(self.write_base)))
                stack.enter_context(hooked(self._base, name, _then(self.write_part)))
            yield


def _then(follow: Any) -> Any:
    def assign(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not thread.following:
            follow()
        return result

    return assign


@contextlib.contextmanager
def _following() -> Iterator[None]:
    before, thread.following = thread.following, True
    try:
        yield
    finally:
        thread.following = before


class Link:
    """A base and its part in step: see `contract.Link`."""

    base_is_current = True
    differentiable_reads = True

    def __init__(self, part: LinkedPart):
        self._part = part
        bases, compacts = _natives(part.base), _natives(part.variable)
        self._pairs = [_Pair(part.tensor_region, base, compact) for base, compact in zip(bases, compacts, strict=True)]

    def holds_merged(self) -> bool:
        return not any(scopes.has_scoped_value(v) for v in (self._part.base, self._part.variable))

    def alias(self, value: tf.Tensor) -> tf.Tensor:
        region = self._part.tensor_region

        @tf.custom_gradient
        def same(compact: tf.Tensor) -> Any:
            return value, lambda upstream: tf.cast(region.gather_gradient(upstream), compact.dtype)

        # Read here: inside of `same` TensorFlow would want a gradient for the variable itself.
        return same(tf.convert_to_tensor(keras_private.raw_value(self._part.variable)))

    def write_base(self) -> None:
        for pair in self._pairs:
            pair.write_base()

    def sync(self) -> None:
        self.write_base()

    def base_assigned(self, value: Any) -> None:
        """Nothing: the native variable's hooks have done it."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for pair in self._pairs:
                stack.enter_context(pair.hooked())
            self.write_base()
            yield


def _natives(variable: keras.Variable) -> Sequence[tf.Variable]:
    """The `tf.Variable` of a Keras variable; one for each replica under a MirroredStrategy."""
    native = keras_private.raw_value(variable)
    if not isinstance(native, tf.distribute.DistributedValues):
        return [native]
    if not isinstance(tf.distribute.get_strategy(), _MIRRORED):  # what others keep of a variable was never tried
        raise TuningError(
            f"{variable.path!r} is distributed as {type(native).__name__}, parts of which are not supported. "
            "Use one device or a tf.distribute.MirroredStrategy."
        )
    return native.values


def _after(zero: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """The value, bit for bit, when `zero` is known."""
    integers = INTEGERS[value.dtype.size]
    return tf.bitcast(tf.bitcast(value, integers) + tf.cast(zero, integers), value.dtype)
