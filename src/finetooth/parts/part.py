"""Part: some elements of a variable, to read, to write in place, and to train as a small variable of their own."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from ..backends import backend
from ..backends.tensor_region import TensorRegion, assign_whole, wide
from ..errors import PartError
from ..keras_internals import marks
from ..keras_internals.weights import index_to_numpy
from ..regions.indexing import resolve_index
from .composed import Composed


class Part:
    """Some elements of a variable: read them, write them in place, or train them and nothing else.

    `variable` is a `keras.Variable`, or one of the backend's own: a `tf.Variable`, a parameter or buffer of PyTorch, an
    array of JAX. `at` is a NumPy-like index (`np.s_[0, :, [5, 2]]`), the text of one (`"[:, :64]"`), a mask of the
    variable's shape or a `Region`. The values have the shape and the order that NumPy gives them, except that index
    lists on several axes mean their outer product. No element may be named twice.

    `read` gives the values. `assign`, `assign_add`, `assign_sub`, `assign_mul`, `assign_min` and `assign_max` change
    them where they are, broadcast what they are given as NumPy does, and return the variable. Values are cast to the
    variable's dtype; fractions are not written into integers. An array of JAX cannot change: there the new array is
    returned, and a function that is compiled with its buffer donated writes in place.

    `part.variable` is a small trainable variable that begins with the part's values, and `merged()` the whole tensor
    with its values in place, which has a gradient for it alone. What was trained is written by
    `part.assign(part.variable)`; any assignment sets the small variable, too.

    >>> import keras, numpy as np, finetooth as ft
    >>> weights = keras.Variable(np.zeros((3, 4), "float32"))
    >>> column = ft.Part(weights, np.s_[:, 1])
    >>> _ = column.assign([1, 2, 3])
    >>> _ = column.assign_mul(10)
    >>> weights.numpy()[:, 1].tolist(), column.shape
    ([10.0, 20.0, 30.0], (3,))
    """

    def __init__(self, variable: Any, at: Any):
        _check_variable(variable)
        named = resolve_index(variable.shape, index_to_numpy(at))
        self._orders = [(axis, order) for axis, order in enumerate(named.orders) if order is not None]
        self._inverses = [(axis, np.argsort(order)) for axis, order in self._orders]
        self._dtype = keras.backend.standardize_dtype(variable.dtype)
        self.base = variable
        self._name = getattr(variable, "path", None) or getattr(variable, "name", None) or "variable"
        self.region = named.region
        self.shape = named.shape
        self.tensor_region = TensorRegion(named.region)

    def read(self) -> Any:
        """The part's values, as a tensor."""
        return self._named(backend.read(self._current(), self.tensor_region))

    def assign(self, value: Any) -> Any:
        """Write the values. The part's own variable keeps the precision it is trained in."""
        own = value is self.__dict__.get("variable")
        return self._write(self._given(value), keep_own=own)

    def assign_add(self, value: Any) -> Any:
        """Add to the values."""
        return self._update(operator.add, value)

    def assign_sub(self, value: Any) -> Any:
        """Subtract from the values."""
        return self._update(operator.sub, value)

    def assign_mul(self, value: Any) -> Any:
        """Multiply the values."""
        return self._update(operator.mul, value)

    def assign_min(self, value: Any) -> Any:
        """Replace the values that are larger."""
        return self._update(keras.ops.minimum, value, ordered=True)

    def assign_max(self, value: Any) -> Any:
        """Replace the values that are smaller."""
        return self._update(keras.ops.maximum, value, ordered=True)

    @functools.cached_property
    def variable(self) -> Any:
        """The part as a trainable variable of its own, of the same kind as the whole, made when first asked for.

        Where the whole is of lower precision it is float32, so that small updates are not rounded away.
        """
        base = self._current()
        check_trainable(base, self._name)
        with backend.outside_of_graphs():
            value = keras.ops.cast(self.read(), wide(self._dtype))
            variable = backend.trainable_like(base, value, f"{self._name.replace('/', '_')}_part")
        setattr(variable, marks.PART, True)
        return variable

    def merged(self, value: Any = None) -> Any:
        """The whole tensor with the part's variable in place, or with another value for it; a gradient for it alone."""
        value = keras.ops.convert_to_tensor(self.variable if value is None else value)
        base = self._current()
        base = base.value if isinstance(base, keras.Variable) else base
        return self.tensor_region.scatter(base, self._compact(keras.ops.cast(value, self._dtype)))

    def gather(self, whole: Any) -> Any:
        """The part of a tensor of the whole's shape: of a gradient, say, which may be sparse."""
        return self._named(self.tensor_region.gather_gradient(whole))

    def __repr__(self) -> str:
        return f"<Part {self.region.text()} of {self._name!r}, {self.region.size:,} elements>"

    def _update(self, operation: Callable[[Any, Any], Any], value: Any, ordered: bool = False) -> Any:
        if ordered and "complex" in self._dtype:
            raise PartError(f"{self!r} holds {self._dtype}, of which none is larger than another. Use assign.")
        return self._write(operation(self.read(), self._given(value)))

    def _write(self, values: Any, keep_own: bool = False) -> Any:
        base = self._current()
        written = backend.write(base, self.tensor_region, self._compact(values))
        if "variable" in self.__dict__ and not keep_own:
            assign_whole(self.variable, keras.ops.cast(values, self.variable.dtype))
        return written

    def _given(self, value: Any) -> Any:
        """What is to be written, checked, in the variable's dtype and the part's shape."""
        if isinstance(value, (bool, int, float, complex, list, tuple)):
            value = np.asarray(value)
        if not hasattr(value, "dtype") or not hasattr(value, "shape"):
            raise PartError(f"{self!r}: expected numbers; received {value!r} of type {type(value).__name__}.")
        dtype = keras.backend.standardize_dtype(value.dtype)
        if _rank(dtype) > _rank(self._dtype):
            raise PartError(
                f"{self!r} holds {self._dtype}; {dtype} cannot be written into it without loss. Cast it first."
            )
        shape = tuple(value.shape)
        while len(shape) > len(self.shape) and shape[0] == 1:  # as NumPy allows in an assignment
            shape = shape[1:]
        fits = len(shape) <= len(self.shape) and all(
            given in (None, 1, wanted) for given, wanted in zip(shape[::-1], self.shape[::-1])
        )
        if not fits:
            raise PartError(f"{self!r} has shape {self.shape}; values of shape {value.shape} do not broadcast to it.")
        value = keras.ops.convert_to_tensor(value)
        value = value if dtype == self._dtype else keras.ops.cast(value, self._dtype)
        if len(shape) < len(value.shape):
            value = keras.ops.reshape(value, shape)
        return value if shape == self.shape else keras.ops.broadcast_to(value, self.shape)

    def _current(self) -> Any:
        """The variable, which must be what it was when the part was made."""
        base = self.base
        if tuple(base.shape) != self.region.shape or keras.backend.standardize_dtype(base.dtype) != self._dtype:
            raise PartError(
                f"{self!r} was made for shape {self.region.shape} and {self._dtype}; the variable has become "
                f"{tuple(base.shape)} and {base.dtype}. Make a new Part of it."
            )
        _check_not_tuned(base, self._name)
        return base

    def _named(self, compact: Any) -> Any:
        """Values in the region's order and shape, in those of the index."""
        for axis, inverse in self._inverses:
            compact = keras.ops.take(compact, inverse, axis=axis)
        return compact if tuple(compact.shape) == self.shape else keras.ops.reshape(compact, self.shape)

    def _compact(self, values: Any) -> Any:
        """The inverse of `_named`."""
        if self.shape != self.region.compact_shape:
            values = keras.ops.reshape(values, self.region.compact_shape)
        for axis, order in self._orders:
            values = keras.ops.take(values, order, axis=axis)
        return values


def check_trainable(variable: Any, name: str) -> None:
    """Only what gradients can train has a trainable part."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if not keras.backend.is_float_dtype(dtype):
        raise PartError(f"{name!r} holds {dtype}, which gradients do not train. Use read and assign.")
    if not getattr(variable, "trainable", getattr(variable, "requires_grad", True)):
        if hasattr(variable, marks.TUNED):
            raise PartError(f"{name!r} is frozen while its model is being tuned. Call finish() or revert() first.")
        raise PartError(f"{name!r} is not trainable. Make it so, or use read and assign.")


def _check_variable(variable: Any) -> None:
    if isinstance(variable, Part) or hasattr(variable, marks.PART):
        raise PartError(
            "A part of a part is not possible. Make one Part of the whole variable, of the elements wanted."
        )
    if not isinstance(variable, keras.Variable) and not backend.is_variable(variable):
        raise PartError(
            f"Expected a keras.Variable or a variable of {keras.backend.backend()}; received {variable!r:.200} of type "
            f"{type(variable).__name__}."
        )
    _check_not_tuned(variable, getattr(variable, "path", "variable"))


def _check_not_tuned(variable: Any, name: str) -> None:
    if isinstance(variable, Composed):
        raise PartError(f"{name!r} is being tuned: its values are its tuning's. Call finish() or revert() first.")


def _rank(dtype: str) -> int:
    """Kinds of numbers, each of which holds the ones before."""
    return next((rank for rank, kind in enumerate(("bool", "int", "float")) if kind in dtype), 3)
