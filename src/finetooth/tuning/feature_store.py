"""Arrays that grow batch by batch, in memory or in files, and never past a bound."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..display.format import parse_size, size
from ..errors import TuningError


class FeatureStore:
    """Arrays with the same number of rows, to which batches of rows are appended. Opened by `feature_store`."""

    def __init__(self, bound: tuple[str, int | str], folder: Path | None):
        self._bound = bound[0]
        try:
            self._limit = parse_size(bound[1])
        except ValueError as error:
            raise TuningError(str(error)) from None
        self._folder = folder
        self._missing: list[Path] = []
        self._columns: dict[str, _Column] = {}
        self._rows = 0

    def append(self, batch: Mapping[str, np.ndarray], expected: int = 0) -> None:
        """Append a batch of rows to the arrays.

        Args:
            batch: The rows of each array, by its name.
            expected: How many rows there will be in all, if that is known.

        Raises:
            TuningError: If the arrays take, or will take, more than the bound.
        """
        self._rows += len(next(iter(batch.values())))
        self._check(batch, max(self._rows, expected))
        for name, array in batch.items():
            if name not in self._columns:
                self._columns[name] = _Column(array, self._path(name))
            self._columns[name].append(array)

    def finish(self) -> list[np.ndarray]:
        """Return the arrays. Files get their names only now, after all of them are written."""
        columns = self._columns.values()
        for column in columns:
            column.complete()
        for column in columns:
            column.publish()
        return [column.array() for column in columns]

    def abandon(self) -> None:
        """Remove every file and folder that was made, also files that have their names already."""
        for column in self._columns.values():
            column.abandon()
        with suppress(OSError):  # it holds something else
            for folder in self._missing:
                folder.rmdir()

    def _path(self, name: str) -> Path | None:
        if self._folder is None:
            return None
        self._missing = self._missing or [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{name}.npy"

    def _check(self, batch: Mapping[str, np.ndarray], rows: int) -> None:
        each = sum(math.prod(array.shape[1:]) * array.itemsize for array in batch.values())
        if rows * each > self._limit:
            way_out = "Raise it." if self._folder else "Raise it, or give folder=... to keep them on the disk."
            raise TuningError(
                f"The features of {rows:,} examples take {size(rows * each)}, {size(each)} each; "
                f"{self._bound}= allows {size(self._limit)}. {way_out}"
            )


@contextmanager
def feature_store(bound: tuple[str, int | str], folder: Path | None) -> Iterator[FeatureStore]:
    """Context manager: a store that takes no more than the bound, such as `("memory", "2 GiB")`.

    A failure inside it leaves nothing behind on the disk.
    """
    store = FeatureStore(bound, folder)
    try:
        yield store
    except BaseException:
        store.abandon()
        raise


class _Column:
    """One array that grows, in memory or in a file, which gets its name when it is complete."""

    def __init__(self, first: np.ndarray, path: Path | None):
        self._rows = 0
        self._shape, self._dtype = first.shape[1:], first.dtype
        self._path = path
        self._memory = bytearray()
        self._file: BinaryIO | None = None
        self._published = False
        if path is not None:
            self._file = open(_partial(path), "wb")
            self._write_header(self._file)

    def append(self, array: np.ndarray) -> None:
        if array.shape[1:] != self._shape or array.dtype != self._dtype:
            raise TuningError(
                f"The features of one batch have the shape {array.shape[1:]} and dtype {array.dtype}, those of the "
                f"first {self._shape} and {self._dtype}. Give all examples one shape, by padding for instance."
            )
        self._rows += len(array)
        if self._file is None:
            self._memory += array.tobytes()
        else:
            self._file.write(array.tobytes())

    def complete(self) -> None:
        """Write what is left of the file, which still has its temporary name."""
        if self._file is not None:
            self._file.seek(0)
            self._write_header(self._file)
            self._file.close()

    def publish(self) -> None:
        """Give the file its name."""
        if self._path is not None:
            os.replace(_partial(self._path), self._path)
            self._published = True

    def array(self) -> np.ndarray:
        """Return the array: in memory, or mapped from its file."""
        if self._path is None:
            return np.frombuffer(self._memory, self._dtype).reshape(-1, *self._shape)
        # Copy on write: a write to the array never reaches the file.
        return np.lib.format.open_memmap(self._path, mode="c").view(self._dtype)

    def abandon(self) -> None:
        """Remove the file, whichever name it has."""
        if self._file is not None and self._path is not None:
            with suppress(OSError):  # a disk that is full: the rest of the file is not wanted
                self._file.close()
            (self._path if self._published else _partial(self._path)).unlink(missing_ok=True)

    def _write_header(self, file: BinaryIO) -> None:
        # NumPy leaves room for a first axis of any length, so the header can be written again once that is known. It
        # does not know bfloat16 and the like; the file holds their bits.
        stored = np.dtype(f"u{self._dtype.itemsize}") if self._dtype.kind == "V" else self._dtype
        header = {"descr": stored.str, "fortran_order": False, "shape": (self._rows, *self._shape)}
        np.lib.format.write_array_header_1_0(file, header)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")
