"""Gate, gate: layers that train, or run, only under a condition that is known when they run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from ..backends import backend
from ..errors import GateError
from ..keras_internals import marks, scopes
from ..keras_internals.masks import keeping_mask
from ..keras_internals.weights import selectable
from ..parts.composed import Composed
from ..selection.heads import head_axes, head_counts
from . import branches as passage
from . import conditions
from . import optimizer as gating

MODES = ("frozen", "stop", "skip")


@keras.saving.register_keras_serializable(package="finetooth")
class Gate(keras.layers.Wrapper):
    """A layer that is trained, or run, only while a condition holds.

    The condition is a value at run time: nothing is traced again when it changes. While it does not hold the gate is
    closed, and what that means is `closed`:

    - `"frozen"`: the layer runs, and its weights get nothing from this step. Gradients pass to what is below.
    - `"stop"`: neither do those below, as far as their gradient comes through here.
    - `"skip"`: the layer is not computed. Its inputs go on in its place, or what `bypass` makes of them.

    Nothing means nothing: no gradient, weight decay, momentum or average, with any Keras optimizer, and no statistics.
    The first two concern training only; a gate that skips does so at inference too, unless it is by chance.

    Args:
        layer: A Keras layer. One that is not built yet is built with the gate.
        when: The condition, unless a call is given one. A boolean; a number from 0 to 1, the chance to be open in a
            step of training; a function of the number of training steps so far, such as `ft.Schedule`; or a
            `keras.Variable` with `trainable=False`, to be assigned. A call takes a tensor, `gate(x, when=...)`: a
            scalar or one value for each example. All that is not zero is open.
        closed: One of the three.
        bypass: A layer or function for `"skip"`.
        seed: For a chance.
        per_head: For attention layers. The condition is then one value for each head.

    >>> import keras, finetooth as ft
    >>> hidden = ft.Gate(keras.layers.Dense(8, name="dense"), when=ft.Schedule(start=100), name="hidden")
    >>> model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
    >>> ft.select(model, "hidden/dense/*").size
    40
    """

    def __init__(
        self,
        layer: keras.Layer,
        when: Any = True,
        closed: str = "frozen",
        bypass: Callable[..., Any] | None = None,
        seed: int | None = None,
        per_head: bool = False,
        **kwargs: Any,
    ):
        if not isinstance(layer, keras.Layer):
            raise GateError(f"A Gate is around a Keras layer; received {layer!r}. For functions there is ft.gate.")
        _check_mode(closed, bypass)
        conditions.check_when(when)
        other = layer.__dict__.get(marks.IN_GATE, lambda: None)()
        if other is not None:
            raise GateError(f"{layer.name!r} is behind the gate {other.name!r} already. Call that gate once more.")
        # What dtype the layer takes is its own affair, and conditions are not to be rounded.
        super().__init__(layer, **{"dtype": layer.dtype_policy, **kwargs, "autocast": False})
        layer.__dict__[marks.IN_GATE] = weakref.ref(self)
        self.__dict__[marks.GATE] = True
        self.heads = head_counts(layer)[0] if per_head else 0
        self.when, self.closed, self.bypass, self.seed = when, closed, bypass, seed
        self.supports_masking = layer.supports_masking
        self.seed_generator = keras.random.SeedGenerator(seed) if conditions.is_chance(when) else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own, and `when`: a condition for this call."""
        if not self.built and args:
            own = {name: value for name, value in kwargs.items() if name not in ("when", "training")}
            if not self.layer.built:
                with keras.name_scope(self.name):
                    self.layer(*_symbols(args), **own)
            if self.closed == "skip":
                self.compute_output_spec(*_symbols(args), **own)
        return super().__call__(*args, **kwargs)

    def build(self, input_shape: Any = None) -> None:
        """Build the layer, and what the gate needs to know and to say whether it is open."""
        super().build(input_shape)
        if isinstance(self.bypass, keras.Layer) and not self.bypass.built:
            self.bypass.build(input_shape)
        shape = (self.heads,) if self.heads else ()
        self.flag = self.add_weight(shape, initializer="zeros", dtype="float32", autocast=False, name="open")
        setattr(self.flag, marks.FLAG_OF, weakref.ref(self))
        if isinstance(self.when, keras.Variable):
            conditions.settle(self.when)
        elif callable(self.when):
            self.step = self.add_weight((), initializer="zeros", dtype="int32", trainable=False, name="step")

    def call(self, inputs: Any, *args: Any, when: Any = None, training: bool | None = None, **kwargs: Any) -> Any:
        """Run the layer, as the condition says."""
        opened = self._opened(when, bool(training))
        if not training and self.closed != "skip":
            return self.layer(inputs, *args, **kwargs)
        args = (inputs, *args)
        if self.heads:
            outputs = self._by_head(opened, args, kwargs)
        else:
            outputs = _run(self.layer, args, kwargs, opened, self.closed, self.bypass, self.add_loss)
        if not training:
            return outputs
        self._guard()
        return self._telling(outputs, opened, (args, kwargs))

    def masks(self, opened: Any) -> Iterator[tuple[keras.Variable, Any]]:
        """Each trained weight, with a mask that says where it is open, given what the flag says."""
        if not self.heads:
            yield from ((variable, opened) for variable in self.layer.trainable_variables)
            return
        _, group = head_counts(self.layer)
        axes = head_axes(self.layer)
        for path, variable in selectable(self.layer).items():
            if isinstance(variable, Composed):
                raise GateError(f"{path!r} is tuned in part: a per_head gate closes whole heads. Leave per_head out.")
            if path in axes:
                place = axes[path]
                by_head = ops.any(ops.reshape(opened, (-1, group)), axis=1) if place.grouped else opened
                by_head = ops.repeat(by_head, place.width) if place.width > 1 else by_head
                yield variable, ops.reshape(by_head, [-1 if i == place.axis else 1 for i in range(len(variable.shape))])

    @staticmethod
    def guard(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Let an optimizer of a training loop of one's own know gates; `fit` does so by itself. Returns it."""
        return gating.guard(optimizer)

    def compute_output_spec(self, *args: Any, when: Any = None, training: Any = None, **kwargs: Any) -> Any:
        """What the layer makes, if the condition and the bypass fit."""
        if when is not None:
            self._fits(conditions.truth(when, "when"))
        outputs = self.layer.compute_output_spec(*args, **kwargs)
        if self.closed == "skip" and not self.heads:
            if self.bypass is None or isinstance(self.bypass, keras.Layer):
                _check_bypass(self.layer, outputs, self.bypass.compute_output_spec(*args) if self.bypass else args[0])
        return outputs

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's."""
        return self.layer.compute_output_shape(*args, **kwargs)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        """The layer's."""
        return self.layer.compute_mask(inputs, previous_mask)

    def get_config(self) -> dict[str, Any]:
        bypass = keras.saving.serialize_keras_object(self.bypass)
        own = {"when": conditions.written(self.when), "closed": self.closed, "bypass": bypass, "seed": self.seed}
        return {**super().get_config(), **own, "per_head": bool(self.heads)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Gate:
        made = {
            name: keras.saving.deserialize_keras_object(config[name], custom_objects=custom_objects)
            for name in ("layer", "bypass")
        }
        return cls(**{**config, **made, "when": conditions.read(config["when"], custom_objects)})

    def _opened(self, when: Any, training: bool) -> Any:
        """A boolean, or a tensor of them. Counts the steps."""
        if when is None:
            when = self.when
            if self.seed_generator is not None:
                drawn = keras.random.uniform((self.heads,) if self.heads else (), seed=self.seed_generator)
                when = ops.less(drawn, when) if training else True
            elif self.built and hasattr(self, "step"):
                when = when(self.step.value)
                if training:
                    self.step.assign(self.step + 1)
        return self._fits(conditions.truth(when, "when"))

    def _fits(self, opened: Any) -> Any:
        if isinstance(opened, bool) or not len(opened.shape):
            return ops.broadcast_to(opened, (self.heads,)) if self.heads else opened
        if self.heads and opened.shape[0] != self.heads:
            raise GateError(f"{self.name!r} has {self.heads} heads; received a condition for {opened.shape[0]}.")
        if self.closed == "skip" and not self.heads:
            raise GateError(
                f"{self.name!r} skips its layer, for all examples or none; received a condition for each of them. Give "
                'it a scalar, keras.ops.any(...) for instance, or use closed="stop".'
            )
        return opened

    def _by_head(self, opened: Any, args: Any, kwargs: Any) -> Any:
        if backend.concrete(ops.all(opened)):
            return self.layer(*args, **kwargs)
        masks = {id(v): (v, mask, scopes.current_value(v)) for v, mask in self.masks(opened)}.values()
        if self.closed == "frozen":
            weights = [(v, ops.where(mask, w, ops.stop_gradient(w))) for v, mask, w in masks]
        else:
            weights = [(v, ops.where(mask, w, ops.zeros_like(w))) for v, mask, w in masks]
        outputs = passage.with_weights(self.layer, args, kwargs, weights, self.add_loss)
        if self.closed != "stop":
            return outputs
        whole = passage.held(self.layer, args, kwargs, self.layer, outputs_too=True)
        return keras.tree.map_structure(passage.carried, outputs, whole)

    def _guard(self) -> None:
        """Let the optimizers know that may train this gate."""
        for model in gating.running_models(self):
            if getattr(model, "optimizer", None) is not None:
                gating.guard(model.optimizer)

    def _telling(self, outputs: Any, opened: Any, inputs: Any) -> Any:
        """The outputs, with whose gradient the flag gets one that says whether the gate was open."""
        if not self.flag.trainable:
            return outputs
        shut = opened is False if isinstance(opened, bool) else backend.concrete(ops.any(opened)) is False
        # Those below a closed gate get zeros: without a gradient some backends would not train them, and others would.
        tensors = [x for x in keras.tree.flatten(inputs) if ops.is_tensor(x)]
        below = [x for x in tensors if _is_float(x)] if shut and self.closed == "stop" else []
        said = ops.convert_to_tensor(opened)
        said = ops.cast(said if self.heads or not len(said.shape) else ops.any(said), "float32") * passage.FAINT
        flag = ops.convert_to_tensor(self.flag)

        def telling(y: Any) -> Any:
            return keeping_mask(lambda y: passage.tied(y, flag, said, *below), y) if _is_float(y) else y

        return keras.tree.map_structure(telling, outputs)


def gate(
    function: Callable[..., Any],
    *inputs: Any,
    when: Any,
    closed: str = "stop",
    bypass: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function of tensors, or a layer, as `Gate` does, for once.

    The condition is a boolean, a scalar or one value for each example. Only gradients are dealt with: a step in which
    those of a layer's weights are zero still decays them, unless there is a `Gate`. `"frozen"` is for layers only,
    since of other functions it is not known what they train.

    >>> import keras, finetooth as ft
    >>> x = keras.ops.ones((2, 3))
    >>> keras.ops.convert_to_numpy(ft.gate(keras.ops.exp, x, when=False, closed="skip")).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    _check_mode(closed, bypass)
    if not callable(function):
        raise GateError(f"Expected a function or layer; received {function!r}.")
    if closed == "frozen" and not isinstance(function, keras.Layer):
        raise GateError(
            f'closed="frozen" holds the weights of a Keras layer, and those of {function!r} are not known. '
            'Use closed="stop" or a layer.'
        )
    opened = conditions.truth(when, "when")
    if closed == "skip" and not isinstance(opened, bool) and len(opened.shape):
        raise GateError('closed="skip" is for all examples or none; received a condition for each. Give it a scalar.')
    if isinstance(function, keras.Layer) and not function.built:
        function(*_symbols(inputs), **kwargs)
    return _run(function, inputs, kwargs, opened, closed, bypass, getattr(function, "add_loss", _no_loss))


def _run(
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    opened: Any,
    closed: str,
    bypass: Callable[..., Any] | None,
    add_loss: Callable[[Any], None],
) -> Any:
    layer = call if isinstance(call, keras.Layer) else None

    def shut() -> Any:
        if closed == "skip":
            return _bypassed(call, bypass, args)
        return passage.held(call, args, kwargs, layer, outputs_too=closed == "stop")

    if isinstance(opened, bool) or not len(opened.shape):
        return passage.choose(opened, lambda: call(*args, **kwargs), shut, layer, add_loss)
    count = keras.tree.flatten(args)[0].shape[0]
    if None not in (count, opened.shape[0]) and count != opened.shape[0]:
        raise GateError(f"when has {opened.shape[0]} values for {count} examples. It takes one for each, or a scalar.")

    def each() -> Any:
        return passage.mixed(call, opened, args, kwargs, shut)

    return passage.choose(ops.any(opened), each, shut, layer, add_loss)


def _check_mode(closed: str, bypass: Any) -> None:
    if closed not in MODES:
        raise GateError(f"closed is one of {', '.join(map(repr, MODES))}; received {closed!r}.")
    if bypass is not None and closed != "skip":
        raise GateError(f'A bypass is what runs in place of a skipped layer: use closed="skip", not {closed!r}.')
    if bypass is not None and not callable(bypass):
        raise GateError(f"A bypass is a layer or a function; received {bypass!r}.")


def _bypassed(call: Callable[..., Any], bypass: Callable[..., Any] | None, args: Any) -> Any:
    """What goes on in place of a skipped layer's outputs, in the dtype it computes in."""
    outputs = args[0] if bypass is None else bypass(*args)
    if not isinstance(call, keras.Layer):
        return outputs

    def cast(y: Any) -> Any:
        return keeping_mask(lambda y: ops.cast(y, call.compute_dtype), y) if _is_float(y) else y

    return keras.tree.map_structure(cast, outputs)


def _check_bypass(layer: keras.Layer, expected: Any, outputs: Any) -> None:
    def kinds(tensors: Any) -> list[Any]:
        return [(tuple(t.shape), _is_float(t) or t.dtype) for t in keras.tree.flatten(tensors)]

    for (shape, dtype), (own_shape, own_dtype) in zip(kinds(expected), kinds(outputs)):
        sizes_fit = len(shape) == len(own_shape) and all(None in (a, b) or a == b for a, b in zip(shape, own_shape))
        if not sizes_fit or dtype != own_dtype:
            raise GateError(
                f"{layer.name!r} makes shape {shape}, and what takes its place when it is skipped has {own_shape}, or "
                "another dtype. Give the gate a bypass, a layer or function that makes the same shape."
            )


def _symbols(args: Any) -> Any:
    """Tensors of these shapes and dtypes, to make a layer know its inputs by."""

    def symbol(x: Any) -> Any:
        return keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype)) if hasattr(x, "shape") else x

    return keras.tree.map_structure(symbol, args)


def _is_float(x: Any) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))


def _no_loss(loss: Any) -> None:
    raise GateError("A layer inside of the function adds to the loss, which ft.gate cannot pass on. Use ft.Gate.")
