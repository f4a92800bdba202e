"""Arrays that grow batch by batch, in memory or in files, and never past a bound."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..display.table import size
from ..errors import TuningError

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def bytes_in(amount: int | str) -> int:
    """A number of bytes, also as text.

    >>> bytes_in(300), bytes_in("2 GiB"), bytes_in("1.5 kB")
    (300, 2147483648, 1500)
    """
    if isinstance(amount, int) and amount > 0:
        return amount
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B\s*", str(amount).upper())
    if match is None:
        raise TuningError(f'A bound is a number of bytes or a text such as "500 MB" or "2 GiB"; received {amount!r}.')
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix])


class Gathering:
    """Arrays with the same number of rows, to which batches of rows are appended. Opened by `gathering`."""

    def __init__(self, bound: tuple[str, int | str], folder: Path | None):
        self._bound, self._limit = bound[0], bytes_in(bound[1])
        self._folder = folder
        self._missing: list[Path] = []
        self._columns: dict[str, _Column] = {}
        self._rows = 0

    def append(self, batch: Mapping[str, np.ndarray], expected: int = 0) -> None:
        """Add a batch of rows to the arrays, by name. `expected`: how many rows there will be, where that is known."""
        self._rows += len(next(iter(batch.values())))
        self._check(batch, max(self._rows, expected))
        for name, array in batch.items():
            if name not in self._columns:
                self._columns[name] = _Column(array, self._path(name))
            self._columns[name].append(array)

    def finish(self) -> list[np.ndarray]:
        """The arrays, whole. Files get their names only now."""
        return [column.finish() for column in self._columns.values()]

    def abandon(self) -> None:
        """Leave nothing on the disk."""
        for column in self._columns.values():
            column.abandon()
        with suppress(OSError):  # somebody else has put something there
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
def gathering(bound: tuple[str, int | str], folder: Path | None) -> Iterator[Gathering]:
    """Arrays that take no more than the bound, `("memory", "2 GiB")` say. A failure leaves nothing behind."""
    gathered = Gathering(bound, folder)
    try:
        yield gathered
    except BaseException:
        gathered.abandon()
        raise


class _Column:
    """One array that grows: its bytes are appended to memory, or to a file that has its final name only when whole."""

    def __init__(self, first: np.ndarray, path: Path | None):
        self._rows = 0
        self._shape, self._dtype = first.shape[1:], first.dtype
        self._path = path
        self._memory = bytearray()
        self._file: BinaryIO | None = None
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

    def finish(self) -> np.ndarray:
        if self._file is None or self._path is None:
            return np.frombuffer(self._memory, self._dtype).reshape(-1, *self._shape)
        self._file.seek(0)
        self._write_header(self._file)
        self._file.close()
        os.replace(_partial(self._path), self._path)
        # Copy on write: what is written to the array, by anybody, never reaches the file.
        return np.lib.format.open_memmap(self._path, mode="c").view(self._dtype)

    def abandon(self) -> None:
        if self._file is not None and self._path is not None:
            self._file.close()
            _partial(self._path).unlink(missing_ok=True)

    def _write_header(self, file: BinaryIO) -> None:
        # NumPy leaves room for a first axis of any length, so the header can be written again once that is known. It
        # does not know bfloat16 and the like; the file holds their bits.
        stored = np.dtype(f"u{self._dtype.itemsize}") if self._dtype.kind == "V" else self._dtype
        header = {"descr": stored.str, "fortran_order": False, "shape": (self._rows, *self._shape)}
        np.lib.format.write_array_header_1_0(file, header)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")
