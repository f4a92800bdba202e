"""The frozen prefix: what lies below everything selected is the same in every epoch, so it is computed once."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ..display.format import size
from ..display.table import Shown, Table
from ..errors import TuningError
from ..keras_internals import marks
from ..parts.trainable import TrainablePart
from . import split_check as exactness
from .attach import sharing
from .feature_store import feature_store
from .split_graph import Cut, cut
from .split_models import alone, halves, prefix

_CHECKED = 4  # examples; enough to see that they are mixed, few enough to run as in training without a compiler


class Split(Shown):
    """A tuned model in two: `lower`, which nothing trains, and `upper`, which trains. Made by `Tuning.split`.

    Both are Functional models of the very layers of the model. `upper` takes what `lower` makes and has the model's
    outputs, under the same names; compile and fit it, and the model is trained. It ends with the tuning.

    >>> import keras, finetooth as ft
    >>> layers = [keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")]
    >>> model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    >>> x, y = keras.ops.ones((8, 4)), keras.ops.ones((8, 1))
    >>> with ft.tune(model, "b/*") as tuning:
    ...     split = tuning.split()
    ...     split.upper.compile("adam", "mse")
    ...     _ = split.upper.fit(split.features(x, verbose=0), y, epochs=5, verbose=0)
    >>> print(tuning.verify(), repr(split))
    Verified: all 15 frozen elements keep their bits. <Split of 'net' after 'a', 12 B per example>
    """

    def __init__(self, cut: Cut, lower: keras.Model, upper: keras.Model):
        self.lower = lower
        self.upper = upper
        self._model = cut.model
        self._cut = cut
        self._open = True
        self._folders: set[Path | None] = set()

    @property
    def example_bytes(self) -> int | None:
        """What the features of one example take; None where that depends on its length."""
        each = [_row_bytes(tensor) for _, tensor in self._cut.crossing]
        return None if None in each else sum(each)  # type: ignore[arg-type]

    def features(
        self,
        x: Any,
        *,
        batch_size: int = 32,
        memory: int | str = "2 GiB",
        folder: str | PathLike[str] | None = None,
        disk: int | str = "20 GiB",
        verbose: Any = "auto",
    ) -> Any:
        """What `lower` makes of the examples, bit for bit as `lower.predict` does, for `upper.fit` to train on.

        The first examples are also run as in training: where the prefix draws random numbers, moves statistics, adds
        losses, mixes examples or hands on a Keras mask, features would not be what training sees, and that is an error.

        Args:
            x: Arrays, as `model.fit` takes them; or batches, in anything that can be iterated over: a `tf.data` or
                Keras dataset, a PyTorch `DataLoader`, a generator. Batches of `(x, y)` or `(x, y, sample_weight)` give
                `(features, y)` or `(features, y, sample_weight)`, all as arrays.
            batch_size: How many examples are computed at once, where `x` is arrays.
            memory: The most the result may take: bytes, or a text such as `"2 GiB"`.
            folder: Where given, the result is written there instead, as `.npy` files that are mapped into memory. Those
                of an earlier run are replaced. Use one folder for each set of examples. `fit` reads such arrays by
                batches on JAX and PyTorch, but all at once on TensorFlow, and so it does with 16-bit floats everywhere;
                if that is too much, give it a `keras.utils.PyDataset` that slices them.
            disk: The most the files may take.
            verbose: 0 for no progress bar.

        Returns:
            An array, or a list of them where several tensors cross the cut; of the tensors' own dtypes.
        """
        self._check_open()
        path = self._free(folder)
        batches, expected, steps = _batches(x, batch_size)
        progress = keras.utils.Progbar(steps, verbose=1 if verbose == "auto" else verbose, unit_name="batch")
        labels: Any = None
        step = 0
        with feature_store(("disk", disk) if path else ("memory", memory), path) as store:
            for step, (inputs, *rest) in enumerate(batches, 1):
                rows = len(keras.tree.flatten(inputs)[0])
                if labels is None:
                    self._check(inputs)
                    labels = [value for value in rest if value is not None]
                    expected = expected or rows * ((steps or 1) - 1)
                columns = {f"features_{i}": array for i, array in enumerate(self._computed(inputs, rows))}
                targets = keras.tree.flatten(rest[: len(labels)])
                columns |= {f"targets_{i}": _array(value) for i, value in enumerate(targets)}
                store.append(columns, expected)
                progress.update(step)
            if labels is None:
                raise TuningError(f"There are no examples in {x!r}.")
            if steps is None:
                progress.update(step, finalize=True)
            arrays = store.finish()
        self._folders.add(path)
        count = len(self._cut.crossing)
        features = alone(arrays[:count])
        return (features, *keras.tree.pack_sequence_as(labels, arrays[count:])) if labels else features

    def table(self) -> Table:
        """Where the cut is, what is below it, and what it costs to keep."""
        rows = [
            (maker, str(tuple(tensor.shape)), str(tensor.dtype), _shown(_row_bytes(tensor)))
            for maker, tensor in self._cut.crossing
        ]
        return Table(
            title=f"Split of {self._model.name!r}" + ("" if self._open else " (finished)"),
            columns=("after", "shape", "dtype", "per example"),
            rows=rows,
            right=("per example",),
            caption=(
                f"to keep per example: {_shown(self.example_bytes)}",
                f"below, computed once: {_names(self._cut, self._cut.below)}",
                f"above, trained: {_names(self._cut, self._cut.above)}",
            ),
        )

    def __repr__(self) -> str:
        makers = ", ".join(repr(maker) for maker, _ in self._cut.crossing)
        return f"<Split of {self._model.name!r} after {makers}, {_shown(self.example_bytes)} per example>"

    def _computed(self, inputs: Any, rows: int) -> list[np.ndarray]:
        arrays = [_array(a) for a in keras.tree.flatten(self.lower.predict_on_batch(inputs))]
        for (maker, _), array in zip(self._cut.crossing, arrays):
            if array.ndim == 0 or len(array) != rows:
                raise TuningError(
                    f"What layer {maker!r} makes of {rows} examples has the shape {array.shape}: it is not one row for "
                    "each, so it cannot be kept by example. Select something below it, or train with model.fit."
                )
        return arrays

    def _check(self, inputs: Any) -> None:
        """The exactness of the prefix, on the first few examples."""
        few = exactness.rows(inputs, range(min(_CHECKED, len(keras.tree.flatten(inputs)[0]))))
        with prefix(self._cut) as (every, makers):
            exactness.check(every, makers, self._model.trainable_variables, few)
        for (maker, _), masked in zip(self._cut.crossing, exactness.masked(self.lower, few)):
            if masked:
                raise TuningError(
                    f"What layer {maker!r} makes carries a Keras mask, as from Embedding(mask_zero=True), which "
                    "features cannot. Train with model.fit, or give the mask to the layers as an input of the model."
                )

    def _free(self, folder: str | PathLike[str] | None) -> Path | None:
        """The folder, which must not hold features of this split: they may be in use."""
        path = None if folder is None else Path(folder).resolve()
        if path is not None and path in self._folders:
            raise TuningError(f"{str(folder)!r} already holds features of this split. Use one folder for each call.")
        return path

    def _check_open(self) -> None:
        if not self._open:
            raise TuningError(f"The tuning of {self._model.name!r} has ended, and its split with it. Call tune again.")

    def _close(self) -> None:
        """Upper must not train on: its layers hold their weights otherwise now. JAX would lose them in the attempt."""
        self._open = False
        for name in ("call", "make_train_function", "make_test_function", "make_predict_function", "get_config"):
            self.upper.__dict__[name] = lambda *_, **__: self._check_open()


@contextmanager
def splitting(
    model: keras.Model,
    trained: Mapping[str, keras.Variable],
    parts: Collection[TrainablePart],
    rules: Mapping[TrainablePart, str],
) -> Iterator[Split]:
    """While open, a tuned model can be trained by halves. `rules` names those by which parts are read."""
    place = cut(model, trained)
    with ExitStack() as stack:
        lower, upper = stack.enter_context(halves(place))
        split = Split(place, lower, upper)
        for half in (lower, upper):  # whoever holds one of them need not hold the model, and with it the tuning
            half.__dict__[marks.WHOLE] = model
            stack.callback(half.__dict__.pop, marks.WHOLE)
        stack.callback(split._close)
        stack.enter_context(sharing(lower, (), rules))
        stack.enter_context(sharing(upper, parts, rules))
        yield split


def _batches(x: Any, batch_size: int) -> tuple[Iterator[Any], int, int | None]:
    """Batches of (x, y, sample_weight); how many examples there are, or 0, and how many batches, or None."""
    leaves = keras.tree.flatten(x)
    if all(hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") for leaf in leaves):
        counts = sorted({int(leaf.shape[0]) for leaf in leaves})
        if len(counts) > 1:
            raise TuningError(f"All inputs must have the same number of examples; received arrays of {counts}.")
        (count,) = counts
        starts = range(0, count, batch_size)
        slices = (keras.tree.map_structure(lambda a, i=i: _as_fit_has_it(a[i : i + batch_size]), x) for i in starts)
        return ((inputs, None, None) for inputs in slices), count, len(starts)
    try:
        steps = x.num_batches if isinstance(x, keras.utils.PyDataset) else len(x)
    except (TypeError, NotImplementedError):
        steps = None
    batches = (keras.utils.unpack_x_y_sample_weight(batch) for batch in x)
    return (keras.tree.map_structure(_tensor, batch) for batch in batches), 0, steps


def _as_fit_has_it(array: Any) -> np.ndarray:
    array = _array(array)
    is_float = array.dtype != object and keras.backend.is_float_dtype(array.dtype)
    return array.astype(keras.config.floatx()) if is_float else array


def _tensor(value: Any) -> Any:
    """What a data set gives, as something every backend takes: PyTorch knows nothing of TensorFlow's tensors."""
    return value if value is None or keras.ops.is_tensor(value) else np.asarray(value)


def _array(value: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value)


def _row_bytes(tensor: Any) -> int | None:
    """What one example takes of a tensor; None where that depends on its length."""
    row = tensor.shape[1:]
    return None if None in row else math.prod(row) * np.dtype(tensor.dtype).itemsize


def _shown(count: int | None) -> str:
    return "bytes by length" if count is None else size(count)


def _names(cut: Cut, calls: Sequence[Any]) -> str:
    """The layers that are called, in order, each once; of very many, the first and the last."""
    names = cut.names(calls)
    shown = names if len(names) <= 12 else [*names[:6], "...", *names[-5:]]
    return ", ".join(shown)
