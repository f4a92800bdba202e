"""What a step costs on one GPU, on JAX or PyTorch: `KERAS_BACKEND=torch python benchmarks/gpu.py`.

Data stays on the device and steps run back to back, so that what is measured is the step. Each row is a model of its
own; the ratio is to the floor of its group, the same model training its biases only (or, for the table, nothing of it).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import keras
import numpy as np

import finetooth as ft

BACKEND = keras.backend.backend()
L = keras.layers
WIDTH, DEPTH, STEPS = 4096, 8, 20

if BACKEND == "torch":
    import torch
else:
    import jax


def dense() -> keras.Model:
    layers = [L.Dense(WIDTH, "relu", name=f"d{i}", dtype="bfloat16") for i in range(DEPTH)]
    return keras.Sequential([keras.Input((WIDTH,), dtype="bfloat16"), *layers])


def table() -> keras.Model:
    tokens = keras.Input((), dtype="int32")
    x = L.Embedding(256_000, 2048, name="table", dtype="bfloat16")(tokens)
    return keras.Model(tokens, x + L.Dense(1, name="top", dtype="bfloat16")(x))


def biases_only(model: keras.Model) -> None:
    for variable in model.trainable_variables:
        variable.trainable = variable.name == "bias"


def everything(model: keras.Model) -> None:
    """Plain training."""


def tuned(*what, reading="auto") -> Callable[[keras.Model], None]:
    return lambda model: ft.tune(model, ft.select(model, *what), reading=reading)


def stepper(model: keras.Model, x, y) -> Callable[[], None]:
    """One training step with Adam, and the wait for it, written with what Keras offers for own loops."""
    optimizer = keras.optimizers.Adam(1e-4)
    variables = model.trainable_variables
    optimizer.build(variables)

    def loss_of(outputs):
        return keras.ops.mean(keras.ops.square(keras.ops.cast(outputs, "float32") - y))

    if BACKEND == "torch":

        def step():
            model.zero_grad()
            loss_of(model(x, training=True)).backward()
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in variables], variables)

        return step
    state = [[v.value for v in side] for side in (variables, model.non_trainable_variables, optimizer.variables)]

    @jax.jit
    def run(trainable, frozen, slots):
        gradients = jax.grad(lambda t: loss_of(model.stateless_call(t, frozen, x, training=True)[0]))(trainable)
        return optimizer.stateless_apply(slots, gradients, trainable)

    def step():
        state[0], state[2] = run(*state)
        return state

    return step


def wait(result) -> None:
    if BACKEND == "torch":
        torch.cuda.synchronize()
    else:
        jax.block_until_ready(result)


def measure(make: Callable[[], keras.Model], prepare: Callable[[keras.Model], None], x, y) -> float:
    model = make()
    prepare(model)
    step = stepper(model, x, y)
    for _ in range(3):
        wait(step())
    start = time.perf_counter()
    for _ in range(STEPS):
        result = step()
    wait(result)
    return 1000 * (time.perf_counter() - start) / STEPS


def group(title: str, make, contenders: dict, x, y) -> None:
    print(f"\n{title}")
    times = {name: measure(make, prepare, x, y) for name, prepare in contenders.items()}
    floor = next(iter(times.values()))
    for name, milliseconds in times.items():
        print(f"  {name:<28}{milliseconds:>9.3f} ms{milliseconds / floor:>8.2f} x floor", flush=True)


def main() -> None:
    device = torch.cuda.get_device_name() if BACKEND == "torch" else jax.devices()[0].device_kind
    print(f"{BACKEND}, Keras {keras.__version__}, {device}")
    rng = np.random.default_rng(0)
    rows, columns = "*/kernel[:205]", "*/kernel[:, :205]"
    for count in (8192, 1024):
        x = keras.ops.cast(rng.normal(size=(count, WIDTH)).astype("float32"), "bfloat16")
        contenders = {
            "biases only": biases_only,
            "finetooth, 5% rows": tuned(rows),
            "finetooth, 5% columns": tuned(columns),
            "composed, 5% columns": tuned(columns, reading="composed"),
            "full Adam": everything,
        }
        group(f"{DEPTH} x Dense({WIDTH}), bfloat16, {count} tokens", dense, contenders, x, keras.ops.zeros(()))
    tokens = keras.ops.convert_to_tensor(rng.integers(0, 256_000, 8192).astype("int32"))
    contenders = {
        "frozen table": biases_only,
        "finetooth, 10 rows": tuned("table/embeddings[255990:]", "top/bias"),
        "composed, 10 rows": tuned("table/embeddings[255990:]", "top/bias", reading="composed"),
    }
    group("embedding 256,000 x 2048, bfloat16, 8192 look-ups", table, contenders, tokens, keras.ops.zeros(()))


if __name__ == "__main__":
    main()
