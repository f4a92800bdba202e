"""The exact bits of arrays: compare them, and prove later that they have not moved."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from .region import Region


def as_bits(array: np.ndarray) -> np.ndarray:
    """View the elements as unsigned integers, so that -0.0 differs from 0.0 and NaN equals itself.

    Elements of 16 bytes, complex numbers of double precision, become pairs of integers.
    """
    array = np.asarray(array, order="C")
    return array.view([("real", "u8"), ("imag", "u8")] if array.dtype.itemsize == 16 else f"u{array.dtype.itemsize}")


def differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compare two arrays bit by bit; returns a boolean array that is true where an element differs."""
    return as_bits(a) != as_bits(b)


@dataclass(frozen=True)
class Fingerprint:
    """A SHA-256 of the bits of a frozen array, and one byte per element to count changes.

    The digest proves that nothing moved. The bytes only count the elements that did: an element whose bits changed
    keeps its byte by chance once in 256, never when it moved by one unit in the last place.
    """

    digest: bytes
    folded: np.ndarray

    @staticmethod
    def of(array: np.ndarray, outside: Region) -> Fingerprint:
        """Take the fingerprint of the elements outside a region."""
        bits = as_bits(array)
        if outside.size:
            bits = outside.scatter(bits, np.zeros(outside.compact_shape, bits.dtype))
        single_bytes = bits.reshape(-1, 1).view(np.uint8)
        folded = np.zeros(bits.size, np.uint8)
        for column in single_bytes.T:  # far faster than a sum along so short an axis
            folded += column
        return Fingerprint(hashlib.sha256(single_bytes.data).digest(), folded)

    def moved(self, other: Fingerprint) -> int:
        """Count the elements that differ between two fingerprints: 0 exactly when all bits are the same."""
        if self.digest == other.digest:
            return 0
        return max(1, int(np.count_nonzero(self.folded != other.folded)))
