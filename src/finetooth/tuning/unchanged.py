"""While a model is tuned, its layers and weights stay the ones that tuning began with, and so does what they train.

Methods that would change them, and assignments to `trainable`, are refused before anything has changed. What has no
method of its own, such as a new layer in a list, is found before the next step of training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from ..errors import TuningError
from ..keras_internals import marks
from ..keras_internals import private as keras_private
from ..keras_internals.hooks import hooked
from ..keras_internals.weights import weights_by_path
from ..parts.composed import as_kind

_ADVICE = "Call finish() or revert() on its tuning first."


def _refuse_trainable(variable: Any, value: bool) -> None:
    if bool(value) != variable.trainable:
        raise TuningError(
            f"{variable.path!r} is a weight of a model that is being tuned, which trains its selection only: "
            f"`trainable` cannot become {bool(value)}. {_ADVICE}"
        )


class Kept:
    """Mixed into every weight of a tuned model: whether it is trained does not change."""

    # With Keras' own getter: torch.compile misreads one that calls super().
    trainable = keras.Variable.trainable.setter(_refuse_trainable)


setattr(Kept, marks.TUNED, True)


@contextmanager
def unchanged(model: keras.Model, layers: Collection[keras.Layer]) -> Iterator[None]:
    """Context manager: refuse what would change the model's weights or which of them train."""
    with ExitStack() as stack:
        for layer in layers:
            for method in _methods(layer):
                stack.enter_context(hooked(layer, method, _refusing(layer, method)))
            stack.enter_context(hooked(layer, keras_private.SET, _setting(layer)))
        for variable in weights_by_path(model).values():
            stack.enter_context(as_kind(variable, Kept))
        yield


def check_unchanged(model: keras.Model) -> Callable[[], None]:
    """Return a function that raises a `TuningError` if the model has other layers or trains other weights than now."""
    layers, trained = keras_private.layers_of(model), model.trainable_variables

    def check() -> None:
        for what, before, now in (
            ("layers", layers, keras_private.layers_of(model)),
            ("trainable weights", trained, model.trainable_variables),
        ):
            if [id(item) for item in before] != [id(item) for item in now]:
                raise TuningError(
                    f"The {what} of {model.name!r} have changed since its tuning began: from {_names(before)} to "
                    f"{_names(now)}. Change them back, or finish the tuning and begin a new one."
                )

    return check


def _names(items: Collection[Any]) -> list[str]:
    return [getattr(item, "path", None) or item.name for item in items]


def _methods(layer: keras.Layer) -> list[str]:
    """The methods of the layer that change its weights."""
    names = ["quantize", "enable_lora", "add_weight"]
    if isinstance(layer, keras.Sequential):
        names += ["add", "pop"]
    if layer.weights and not isinstance(layer, keras.Model):  # a built model is built again without a change
        names.append("build")
    return [name for name in names if hasattr(layer, name)]


def _refusing(layer: keras.Layer, method: str) -> Callable[..., Any]:
    def refuse(original: Any, *args: Any, **kwargs: Any) -> Any:
        raise TuningError(f"{layer.name!r} is being tuned: `{method}` would change its weights. {_ADVICE}")

    return refuse


def _setting(layer: keras.Layer) -> Callable[..., Any]:
    def set_attribute(original: Any, name: str, value: Any) -> Any:
        if name == "trainable" and _would_change(layer, bool(value)):
            raise TuningError(f"{layer.name!r} is being tuned: `trainable` cannot become {value}. {_ADVICE}")
        if name == "dtype_policy" and keras.dtype_policies.get(value) != layer.dtype_policy:
            raise TuningError(f"{layer.name!r} is being tuned: `dtype_policy` cannot change. {_ADVICE}")
        return original(name, value)

    return set_attribute


def _would_change(layer: keras.Layer, trainable: bool) -> bool:
    """Whether the public setter of `trainable` would change a flag that matters, of the layer or inside it."""
    inside = [inner for inner in keras_private.layers_of(layer) if inner.weights]
    flags = [inner.trainable for inner in inside]
    flags += [variable.trainable for inner in inside for variable in keras_private.made_trainable(inner)]
    return any(flag != trainable for flag in flags)
