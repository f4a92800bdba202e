"""The errors finetooth raises. Each is also a `ValueError`."""

from __future__ import annotations

from typing import Any


class FinetoothError(ValueError):
    """Anything finetooth refuses to do; nothing was changed."""


class SelectionError(FinetoothError):
    """A selection that cannot be read, or that does not fit the model."""


class TuningError(FinetoothError):
    """A model that cannot be tuned as asked, or is being tuned already."""


class PartError(FinetoothError):
    """A part of a variable that cannot be read, written or trained as asked."""


class BatchError(FinetoothError):
    """Examples or tokens of a batch that cannot be chosen as asked."""


class GateError(FinetoothError):
    """A gate, or its condition, that cannot work as asked."""


class PatchError(FinetoothError):
    """A patch that does not fit the model it is applied to."""


def brief(value: Any) -> str:
    """Show a value in an error message: an array by its shape and dtype, anything long cut off."""
    if getattr(value, "shape", ()) and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
