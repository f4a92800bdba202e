"""The errors that finetooth raises. Each is also a `ValueError`."""

from __future__ import annotations

from typing import Any


class FinetoothError(ValueError):
    """Base class of all errors that finetooth raises. Nothing has been changed when one is raised.

    >>> import finetooth as ft
    >>> issubclass(ft.SelectionError, ft.FinetoothError), issubclass(ft.FinetoothError, ValueError)
    (True, True)
    """


class SelectionError(FinetoothError):
    """Raised for a selection that cannot be read, or that does not fit the model."""


class TuningError(FinetoothError):
    """Raised for a model that cannot be tuned as asked, or is being tuned already."""


class PartError(FinetoothError):
    """Raised for a part of a variable that cannot be read, written or trained as asked."""


class BatchError(FinetoothError):
    """Raised where examples or tokens of a batch cannot be kept as asked."""


class GateError(FinetoothError):
    """Raised for a gate, or its condition, that cannot work as asked."""


class PatchError(FinetoothError):
    """Raised for a patch that does not fit the model it is applied to."""


def brief(value: Any) -> str:
    """Show a value in an error message: an array by its shape and dtype, anything long cut off."""
    if getattr(value, "shape", ()) and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
