"""Wrapper: what optimizers that wrap another one share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ..backends import backend
from ..errors import TuningError
from ..keras_internals import marks


class Wrapper(keras.optimizers.Optimizer):
    """An optimizer around an `inner_optimizer`, to which every setting belongs."""

    trained: list[Any]  # the variables that the optimizer was built for

    def __init__(self, inner_optimizer: keras.optimizers.Optimizer, name: str | None):
        if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
            raise TuningError(f"Expected a Keras optimizer; received {inner_optimizer!r}.")
        if inner_optimizer.built:
            raise TuningError(f"{inner_optimizer.name!r} has been used already. Give {type(self).__name__} a new one.")
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.__dict__["trained"] = []

    def build_wrapper(self, variables: list[Any]) -> None:
        """Remember the variables; the last thing that `build` does."""
        self.__dict__["trained"] = variables  # past Keras' tracking on TensorFlow
        super().build(variables)

    def positions(self, grads: Sequence[Any], variables: Sequence[Any] | None) -> list[int]:
        """Which of the variables that the optimizer is built for these are, building it if need be."""
        if variables is None:
            variables = self.trained
        _check_not_frozen(variables)
        if not self.built:
            with backend.outside_of_graphs(), keras.name_scope(self.name):
                self.build(variables)
        if len(grads) != len(variables):
            raise TuningError(f"{len(grads)} gradients were given for {len(variables)} variables.")
        known = {id(variable): i for i, variable in enumerate(self.trained)}
        unknown = [variable for variable in variables if id(variable) not in known]
        if unknown:
            raise TuningError(
                f"{self.name!r} was built for other variables than {unknown[0]!r:.200}. Use a new optimizer for it."
            )
        for gradient, variable in zip(grads, variables):
            if gradient is not None and not _fits(gradient.shape, variable.shape):
                raise TuningError(f"A gradient of shape {gradient.shape} was given for {variable!r:.200}.")
        return [known[id(variable)] for variable in variables]

    def check_stateless(self, optimizer_variables: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        if keras.backend.backend() == "tensorflow":
            raise TuningError("stateless_apply is not supported by Keras' optimizers on TensorFlow. Use apply.")
        if not self.built:
            raise TuningError(f"Call {type(self).__name__}.build(variables) before stateless_apply.")
        _check_not_frozen(self.trained)
        for given, own, what in (
            (optimizer_variables, self.variables, "optimizer"),
            (trainable_variables, self.trained, "trainable"),
        ):
            if len(given) != len(own):
                raise TuningError(f"Expected {len(own)} {what} variables; received {len(given)}.")

    @property
    def variables(self) -> list[keras.Variable]:
        return super().variables + self.inner_optimizer.variables

    @property
    def learning_rate(self) -> Any:
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> Any:
        return self.inner_optimizer.iterations

    @property
    def loss_scale_factor(self) -> Any:
        return self.inner_optimizer.loss_scale_factor if "inner_optimizer" in self.__dict__ else None

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        if "inner_optimizer" in self.__dict__:
            self.inner_optimizer.loss_scale_factor = value

    def scale_loss(self, loss: Any) -> Any:
        return self.inner_optimizer.scale_loss(loss)

    @property
    def keeps_averages(self) -> bool:
        """Whether the innermost optimizer averages weights."""
        inner = self.inner_optimizer
        while hasattr(inner, "inner_optimizer"):
            inner = inner.inner_optimizer
        return bool(inner.use_ema)

    def finalize_variable_values(self, var_list: Any) -> None:
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer)}

    @classmethod
    def with_inner(cls, config: dict[str, Any], custom_objects: Any = None) -> dict[str, Any]:
        """The configuration, with the inner optimizer made."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects=custom_objects)
        return {**config, "inner_optimizer": inner}

    def save_own_variables(self, store: Any) -> None:
        """Save the state, of which there is none before the optimizer is built."""
        if self.built:
            super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Load the state, if any was saved; Keras would only warn where it is not this optimizer's."""
        if not store.keys():
            return
        variables = self.variables
        shapes = [tuple(store[str(i)].shape) for i in range(len(store.keys())) if str(i) in store.keys()]
        if len(shapes) != len(store.keys()) or shapes != [tuple(variable.shape) for variable in variables]:
            raise TuningError(
                f"The saved state of {self.name!r} does not fit: {len(store.keys())} variables were saved, and "
                f"{len(variables)} of other shapes, or another number, are expected."
            )
        super().load_own_variables(store)


def _check_not_frozen(variables: Sequence[Any]) -> None:
    """No optimizer moves what a tuning keeps as it is, or trains in a part."""
    frozen = [v for v in variables if hasattr(v, marks.TUNED) and not v.trainable]
    if frozen:
        raise TuningError(
            f"{frozen[0].path!r} is frozen while its model is being tuned. Call finish() or revert() first, or train "
            "model.trainable_variables."
        )


def _fits(given: Any, wanted: Any) -> bool:
    """Whether a gradient's shape, as far as it is known, is the variable's."""
    if getattr(given, "rank", 0) is None:  # TensorFlow need not know it while a function is traced
        return True
    return len(given) == len(wanted) and all(a is None or a == b for a, b in zip(given, wanted))


def copy_of(optimizer: keras.optimizers.Optimizer, **changes: Any) -> keras.optimizers.Optimizer:
    """A new optimizer with the same settings, but for these."""
    return type(optimizer).from_config({**optimizer.get_config(), **changes})
