"""No step of a model that fails loses weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from ..keras_internals.hooks import hooked
from . import backend


@contextmanager
def guarded_steps(model: keras.Model, *names: str) -> Iterator[None]:
    """While open, what Keras compiles for "train", "test" or "predict" puts back what it has taken if it fails."""

    def making(name: str) -> Callable[..., None]:
        def make(original: Any, *args: Any, **kwargs: Any) -> None:
            before = getattr(model, name)
            original(*args, **kwargs)
            if getattr(model, name) is not before:
                setattr(model, name, backend.restore_weights_on_failure(model, getattr(model, name)))

        return make

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(hooked(model, f"make_{name}_function", making(f"{name}_function")))
        yield
