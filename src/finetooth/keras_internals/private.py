"""The private names of Keras that finetooth cannot do without. Nothing else in the package uses any.

Keras has no public way to list the layers inside a layer, to tell a statistic from a weight that someone froze, to add
a variable to a built layer, or to walk the graph of a model. `tests/keras_internals/test_private.py` and `tests/tuning`
fail when one of these moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from . import marks

JAX_STATE = ("jax_state_sync", "_get_jax_state")  # by which `fit` on JAX takes and returns what variables hold
TORCH_PARAMETERS = ("_torch_params", "_track_variables")  # what a layer on PyTorch lists, and what makes the list
SET = "_setattr_hook"  # the method by which a layer hears of every attribute that is set on it


def layers_of(layer: keras.Layer) -> list[keras.Layer]:
    """The layer and every layer inside it, each once, outer ones first."""
    return layer._flatten_layers()


def inner_layers(layer: keras.Layer) -> list[keras.Layer]:
    """The layers directly inside the layer."""
    return layer._flatten_layers(include_self=False, recursive=False)


def own_variables(layer: keras.Layer) -> list[keras.Variable]:
    """The weights the layer holds itself, without those of the layers inside it."""
    return layer._trainable_variables + layer._non_trainable_variables


def made_trainable(layer: keras.Layer) -> list[keras.Variable]:
    """The layer's own weights that were created to be trained, whether or not they are frozen now."""
    return list(layer._trainable_variables)


def lora_ids(layer: keras.Layer) -> set[int]:
    """The ids of the variables that `enable_lora` has added to the layer and the layers inside it."""
    enabled = [inner for inner in layers_of(layer) if getattr(inner, "lora_enabled", False)]
    return {id(v) for inner in enabled for v in own_variables(inner) if v.name.startswith("lora_")}


def set_trainable(layer: keras.Layer | keras.Variable, trainable: bool) -> None:
    """The flag of this layer or variable alone.

    The public setter of a layer also overwrites those of all its weights and inner layers, and that of a variable tells
    PyTorch.
    """
    layer._trainable = trainable


def track(layer: keras.Layer, variable: keras.Variable) -> None:
    """Add a variable to the weights of a built layer."""
    locked, trainable = layer._tracker.locked, variable.trainable
    layer._tracker.unlock()
    try:
        layer._track_variable(variable)
    finally:
        if locked:
            layer._tracker.lock()
    variable.trainable = trainable  # tracking in a frozen layer clears the flag


def untrack(layer: keras.Layer, variable: keras.Variable) -> None:
    """The inverse of `track`."""
    layer._untrack_variable(variable)


def raw_value(variable: keras.Variable) -> Any:
    """The backend's own variable or array, past any scope. None while `fit` holds it, as JAX does during an epoch."""
    return variable._value


def is_tuned(model: keras.Layer) -> bool:
    """Whether the model, or a layer or weight of it, is being tuned."""
    return any(marks.TUNED in layer.__dict__ for layer in layers_of(model)) or any(
        hasattr(v, marks.TUNED) for v in model.weights
    )


def calls_of(model: keras.Model) -> list[Any] | None:
    """The calls a Functional or Sequential model is made of, each after those it depends on; None for other models.

    A call (a node, in Keras) has an `operation`, `input_tensors` and `output_tensors`; an `is_input` one has no inputs.
    """
    by_depth = getattr(getattr(model, "_functional", model), "_nodes_by_depth", None)
    return None if by_depth is None else [call for depth in sorted(by_depth, reverse=True) for call in by_depth[depth]]


def call_again(call: Any, tensors: Mapping[int, Any], operation: Any = None) -> Any:
    """Repeat a call, of its own or another operation, with other symbolic tensors, by the ids of those it had."""
    args, kwargs = call.arguments.fill_in(tensors)
    return (operation or call.operation)(*args, **kwargs)


def arguments_of(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What an operation was called with, by position and by name."""
    return call.arguments.args, call.arguments.kwargs


def makers_of(call: Any) -> list[Any]:
    """The operations that made what the call takes."""
    return [parent.operation for parent in call.parent_nodes]


def calls_in(operation: Any) -> list[Any]:
    """The calls of the operation; the list itself, to which Keras appends and by whose order it finds them."""
    return operation._inbound_nodes


def calls_out(operation: Any) -> list[Any]:
    """The calls that take what the operation made; the list itself."""
    return operation._outbound_nodes


def undistributed(kind: Any) -> Any:
    """A kind of optimizer without what TensorFlow's version of all of them does for distribution.

    That takes variables of TensorFlow only, and knows variables by their handles.
    """
    if keras.backend.backend() != "tensorflow":
        return kind
    specific = keras.optimizers.Optimizer.__mro__[1]
    base = next(cls for cls in specific.__mro__ if "update_step" in cls.__dict__)
    names = ("assign", "assign_add", "assign_sub", "_var_key", "_apply_weight_decay", "_backend_update_step")
    plain = type("Undistributed", (specific,), {name: getattr(base, name) for name in names})
    return type(kind.__name__, (kind, plain), {})


def decay_like(optimizer: Any, other: Any, counterparts: Mapping[int, Any]) -> None:
    """Let weight decay leave out what it leaves out in another optimizer, by ids of variables and theirs there."""
    optimizer.__dict__["_use_weight_decay"] = lambda variable: other._use_weight_decay(counterparts[id(variable)])


def build_for(model: keras.Model, data: Any) -> None:
    """Make everything that training on such a batch needs: weights, losses, metrics, the optimizer's state."""
    model._symbolic_build(data_batch=data)


def takes_training(layer: keras.Layer) -> bool:
    """Whether the layer's call is told that it is training."""
    return layer._call_has_training_arg


def compiled_losses(model: keras.Model) -> list[tuple[Any, tuple[keras.losses.Loss, Any]]]:
    """Where each compiled loss belongs in the model's output, the loss, and its weight or None."""
    compiled = model._compile_loss
    return [] if compiled is None else [(path, (loss, weight)) for path, loss, weight, _ in compiled._flat_losses]


def compiled_loss(model: keras.Model) -> keras.losses.Loss:
    """The function of targets, predictions and weights that `compile` was given, for all outputs."""
    return model._compile_loss


def loss_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics in which a step reports losses: of all outputs together, then of each where there are several."""
    return [model._loss_tracker, *(model._compile_loss.metrics if model._compile_loss is not None else [])]


def metrics_in(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics that the model holds itself; the list itself."""
    return model._metrics


def never_cast(variable: keras.Variable) -> None:
    """Let the variable be read as it is, also in a layer that computes in another precision."""
    variable._autocast = False


def entry_layer(layer: keras.Layer) -> keras.Layer:
    """The outermost layer or model of the call that this layer's is a part of."""
    context = layer._get_call_context()
    if not hasattr(context, "training"):  # made just now: the layer is not called, but `stateless_call` runs it
        layer._maybe_reset_call_context()
    return context.entry_layer


def forget_losses(layer: keras.Layer) -> None:
    """Let the layer not know the losses that it has added: who else has them counts them."""
    layer._clear_losses()


def trained_by(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def optimizers_in(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizer and those that it is made of."""
    inner = (
        [optimizer.inner_optimizer] if hasattr(optimizer, "inner_optimizer") else getattr(optimizer, "optimizers", [])
    )
    return [optimizer, *(member for each in inner for member in optimizers_in(each))]


def averages_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The moving averages of the variables that an optimizer was built for; empty where it keeps none."""
    return list(optimizer._model_variables_moving_average) if optimizer.use_ema else []


def accumulators_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Return the variables in which a built optimizer adds up gradients between its updates."""
    return list(optimizer._accumulated_gradients) if optimizer.gradient_accumulation_steps else []


NATIVE_FILES = ("_save_state", "_load_state")  # functions that save and load each layer or optimizer of a model
LEGACY_HDF5 = (  # functions that read or write all weights of a model, in an order that depends on trainable flags
    "save_model_to_hdf5",
    "load_weights_from_hdf5_group",
    "load_weights_from_hdf5_group_by_name",
)
LEGACY_OPTIMIZER = "save_optimizer_weights_to_hdf5_group"


def saving_modules() -> tuple[Any, Any]:
    """Keras' modules for .keras and .weights.h5 files, and for legacy HDF5 files."""
    modules = keras.saving.save_model.__globals__
    return modules["saving_lib"], modules["legacy_h5_format"]


def step_counts(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """How often the optimizer, and those that it is made of, were applied, accumulating steps included."""
    return [member._iterations for member in optimizers_in(optimizer)]


def unbuild(optimizer: keras.optimizers.Optimizer, new: keras.optimizers.Optimizer) -> None:
    """Let an optimizer be as if `build` had not been called. `new` is an unbuilt copy: it has what stays."""
    for member, other in zip(optimizers_in(optimizer), optimizers_in(new)):
        for variable in member._variables[len(other._variables) :]:
            member._tracker.untrack(variable)
        member._trainable_variables = []
        member._trainable_variables_indices = {}
        member.built = False
