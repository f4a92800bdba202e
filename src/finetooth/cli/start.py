"""What commands do before they run: start Keras on a backend, and load a model without running code in its file."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import FinetoothError

BACKENDS = ("tensorflow", "jax", "torch")


class CommandError(FinetoothError):
    """Raised for a command that cannot do what was asked."""


def start_keras(backend: str | None, *others: str) -> None:
    """Import Keras on the wanted backend, and others where installed, without the notes they write as they start."""
    running = sys.modules.get("keras")
    if backend and running and running.backend.backend() != backend:
        raise CommandError(f"Keras runs on {running.backend.backend()} in this process already; received {backend!r}.")
    if backend:
        os.environ["KERAS_BACKEND"] = backend
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        with _stderr_kept_back(level == "3"):
            for name in ("keras", *(name for name in others if find_spec(name))):
                import_module(name)
    except ImportError as error:
        raise CommandError(
            f"Keras cannot start: {error}. Install a backend, for example "
            f'`pip install "finetooth[{backend or "tensorflow"}]"`, or choose another with --backend.'
        ) from None


@contextmanager
def _stderr_kept_back(wanted: bool) -> Iterator[None]:
    """Hold back all output to stderr, from C++ too, and show it only when the block fails.

    TensorFlow writes a few notes to the file descriptor whatever its log level.
    """
    if not wanted:
        yield
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as notes:
        os.dup2(notes.fileno(), 2)
        try:
            yield
        except BaseException:
            notes.seek(0)
            os.write(stderr, notes.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)


def check_file(path: Path) -> None:
    """Refuse all but `.keras` files. Keras would load HDF5 without safe mode, and other things by name alone."""
    if path.suffix.lower() in (".h5", ".hdf5"):
        raise CommandError(
            f"{str(path)!r} is an HDF5 file, and Keras loads those without safe mode: code inside could run. If you "
            "trust it, load it in Python, write it with `model.save('NAME.keras')`, and inspect that."
        )
    if path.suffix != ".keras":
        raise CommandError(f"Expected a model saved as NAME.keras; received {str(path)!r}.")
    if not path.is_file():
        raise CommandError(f"There is no file {str(path)!r}.")


def load(path: Path) -> Any:
    """Load the model in a `.keras` file; no code in the file runs."""
    from keras.saving import load_model

    try:
        return load_model(path, compile=False, safe_mode=True)
    except Exception as error:  # A file that someone else wrote can fail in any way.
        reason = str(error).strip().split("\n\n")[0] or type(error).__name__
        raise CommandError(f"{str(path)!r} cannot be loaded: {reason}") from None
