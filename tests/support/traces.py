"""Everything of a model in which a tuning could leave a trace."""

import keras

from finetooth.keras_internals import private as keras_private


def state_of(model):
    """Everything of a model that tuning could leave a trace in."""
    layers = model._flatten_layers()
    return {
        "layers": [id(layer) for layer in layers],
        "attributes": [sorted(vars(layer)) for layer in layers],
        "call": [layer.call.__func__ for layer in layers],
        "flags": [layer.trainable for layer in layers],
        "variables": [(id(v), v.path, type(v), v.trainable, sorted(vars(v))) for v in model.variables],
        "trainable": [id(v) for v in model.trainable_variables],
        "config": model.get_config(),
        "parameters": [id(p) for p in model.parameters()] if keras.backend.backend() == "torch" else None,
        "locked": [layer._tracker.locked for layer in layers],
    }


def graph_of(model):
    """The calls of every layer and operation, nested ones too, which models made of them add to."""
    operations, models = {}, [model]
    while models:
        found = {id(call.operation): call.operation for call in keras_private.calls_of(models.pop())}
        models += [o for o in found.values() if isinstance(o, keras.Model) and keras_private.calls_of(o)]
        operations |= found
    return {name: ([*map(id, o._inbound_nodes)], [*map(id, o._outbound_nodes)]) for name, o in operations.items()}
