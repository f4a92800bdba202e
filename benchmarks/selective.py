"""What selective backpropagation and gates save, next to what people do instead.

    python benchmarks/selective.py [BACKEND ...] [--json FILE]

Examples: `fit` on whole batches, on the hardest half and quarter of each, and the same by a training step of one's own
that indexes the losses after the forward pass, or that samples as Composer does. Scoring is a forward pass, a third of
a step, so a share f of the examples can cost no less than (1 + 3f) / 3 of a whole step. Tokens: a language model with
8,192 words. Gates: a block of layers that is skipped in every other step.
One process per backend; contenders take turns with an epoch each, and the fastest of the rounds counts: now and then an
epoch on TensorFlow waits for its data pipeline for half a second, or runs on one core.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from per_backend import main, progress

OURS, WHOLE = "finetooth", "whole batches"
STEPS, ROUNDS = 8, 11  # in an epoch; epochs of each contender
SHARES = (0.5, 0.25)


def measured(backend: str) -> dict[str, Any]:
    native = importlib.import_module(f"selective_{backend}")
    results: dict[str, Any] = {"examples": {}}
    for name, (make, data) in {"cnn": images(), "transformer": sequences()}.items():
        progress(f"{backend}: examples of a {name}")
        results["examples"][name] = timed(example_epochs(native, make, data))
    progress(f"{backend}: tokens")
    results["tokens"] = timed(token_epochs())
    progress(f"{backend}: gates")
    results["gates"] = timed(gate_epochs())
    return results


def images() -> tuple[Callable[..., Any], Any]:
    import keras
    import numpy as np
    from keras import layers

    def make(kind: Any = keras.Model) -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((28, 28, 1))
        x = layers.Conv2D(32, 3, activation="relu")(inputs)
        x = layers.BatchNormalization()(layers.Conv2D(64, 3, strides=2, activation="relu")(x))
        x = layers.Conv2D(64, 3, activation="relu")(x)
        return kind(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))

    rng = np.random.default_rng(0)
    return make, (rng.normal(size=(STEPS * 128, 28, 28, 1)).astype("float32"), rng.integers(0, 10, STEPS * 128), 128)


def sequences() -> tuple[Callable[..., Any], Any]:
    import keras
    import numpy as np
    from keras import layers

    def make(kind: Any = keras.Model) -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((64,), dtype="int32")
        x = body(layers.Embedding(1000, 128)(inputs))
        return kind(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))

    rng = np.random.default_rng(0)
    return make, (rng.integers(0, 1000, (STEPS * 64, 64)), rng.integers(0, 10, STEPS * 64), 64)


def body(x: Any, blocks: int = 2, width: int = 128) -> Any:
    from keras import layers

    for _ in range(blocks):
        x = x + layers.MultiHeadAttention(4, width // 4)(layers.LayerNormalization()(x), layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x)))
    return layers.LayerNormalization()(x)


def compiled(model: Any) -> Any:
    import keras

    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fitting(model: Any, x: Any, y: Any, batch_size: int, epochs: int = 1) -> Callable[[], float]:
    """Fits for some epochs, and returns the milliseconds for a step; what is between epochs is not in them."""
    import keras

    def epoch() -> float:
        times: list[float] = []
        note = lambda *_, **__: times.append(time.perf_counter())  # noqa: E731
        noting = keras.callbacks.LambdaCallback(on_epoch_begin=note, on_epoch_end=note)
        model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=[noting])
        return 1000 * sum(end - begin for begin, end in zip(times[::2], times[1::2])) / (STEPS * epochs)

    return epoch


def timed(epochs: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Milliseconds for a step in the fastest of the rounds; the first, which compiles, does not count."""
    rounds: dict[str, list[float]] = {name: [] for name in epochs}
    for count in range(ROUNDS + 1):
        for name, epoch in epochs.items():
            milliseconds = epoch()
            if count:
                rounds[name].append(milliseconds)
    return {name: min(found) for name, found in rounds.items()}


def example_epochs(native: Any, make: Callable[..., Any], data: Any) -> dict[str, Callable[[], Any]]:
    import keras
    import numpy as np

    import finetooth as ft

    x, y, batch_size = data
    epochs = {WHOLE: fitting(compiled(make()), x, y, batch_size)}
    for share in SHARES:
        percent = f"{share:.0%}"
        ours = compiled(make())
        ft.selective_backprop(ours, share)
        epochs[f"{OURS}, {percent}"] = fitting(ours, x, y, batch_size)
        stale = compiled(_named(make()))
        ft.selective_backprop(stale, share, score=ft.batch.Stale("id", len(x), 2 * STEPS))
        epochs[f"{OURS}, {percent}, scored every other epoch"] = fitting(
            stale, {"examples": x, "id": np.arange(len(x))}, y, batch_size, epochs=2
        )
        for name, kind in (("losses indexed", native.indexed), ("as Composer", native.sampled)):
            epochs[f"{name}, {percent}"] = fitting(compiled(make(kind(share))), x, y, batch_size)
    keras.utils.set_random_seed(0)
    return epochs


def _named(model: Any) -> Any:
    """The model with a name for its input, so that the examples' numbers can come with them."""
    import keras

    inputs = keras.Input(model.input.shape[1:], dtype=model.input.dtype, name="examples")
    return keras.Model([inputs], model(inputs))


def token_epochs() -> dict[str, Callable[[], Any]]:
    import keras
    import numpy as np
    from keras import layers

    import finetooth as ft

    def make() -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((64,), dtype="int32")
        return compiled(keras.Model(inputs, layers.Dense(8192)(body(layers.Embedding(8192, 128)(inputs)))))

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 8192, (2, STEPS * 16, 64))
    epochs = {WHOLE: fitting(make(), x, y, 16)}
    for share in SHARES:
        model = make()
        ft.selective_backprop(model, share, tokens=True)
        epochs[f"{OURS}, {share:.0%}"] = fitting(model, x, y, 16)
    return epochs


def gate_epochs() -> dict[str, Callable[[], Any]]:
    """The block is four layers of 1024 x 1024, and a batch has 512 examples, so that it is most of a step."""
    import keras
    import numpy as np
    from keras import layers

    import finetooth as ft

    def make(block: Any) -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((1024,))
        x = layers.Dense(1024, activation="relu")(inputs)
        return compiled(keras.Model(inputs, layers.Dense(10)(x if block is None else block(x))))

    def block() -> Any:
        return keras.Sequential([layers.Dense(1024, activation="relu") for _ in range(4)])

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(STEPS * 512, 1024)).astype("float32"), rng.integers(0, 10, STEPS * 512)
    every_other = ft.Schedule(every=2)
    models = {
        "without the block": make(None),
        "with the block": make(block()),
        f"{OURS}, skipped in every other step": make(ft.Gate(block(), when=every_other, closed="skip")),
        f"{OURS}, frozen in every other step": make(ft.Gate(block(), when=every_other, closed="frozen")),
    }
    return {name: fitting(model, x, y, 512) for name, model in models.items()}


def tables(backend: str, result: dict[str, Any]) -> list[str]:
    from finetooth.display.table import Table

    shown = []
    for title, rows in (
        *((f"examples, {name}", rows) for name, rows in result["examples"].items()),
        ("tokens, 8,192 words", result["tokens"]),
    ):
        cells = []
        for name, milliseconds in rows.items():
            least = ceiling(name)
            relative = milliseconds / rows[WHOLE]
            bound = ("-", "-") if title[0] == "t" or least is None else (f"{least:.3f}", f"{relative / least:.2f}")
            cells.append((name, f"{milliseconds:.1f}", f"{relative:.3f}", *bound))
        columns = ("", "ms a step", "of whole batches", "ceiling", "x ceiling")
        shown.append(Table(f"{backend}: {title}", columns, cells, right=columns[1:]))
    cells = [(name, f"{milliseconds:.1f}") for name, milliseconds in result["gates"].items()]
    shown.append(Table(f"{backend}: a gate around a block", ("", "ms a step"), cells, right=("ms a step",)))
    return [str(table) for table in shown]


def ceiling(name: str) -> float | None:
    """The least that scoring and then training on a share can cost, of a whole step. None where it is not that."""
    share = next((share for share in SHARES if f"{share:.0%}" in name), None)
    return None if share is None or "indexed" in name or "every other" in name else (1 + 3 * share) / 3


def goals(results: dict[str, Any]) -> Any:
    """What finetooth aims at, and what this run reached. Reported, not enforced."""
    from finetooth.display.table import Table

    rows = []
    for backend, result in results.items():
        for name, times in result["examples"].items():
            for share in (f"{share:.0%}" for share in SHARES):
                ours = times[f"{OURS}, {share}"]
                least = ceiling(f"{OURS}, {share}") or 1.0
                checks = [(f"{name}, {share}: of the ceiling", ours / times[WHOLE] / least, 1.08)]
                for other in ("losses indexed", "as Composer"):
                    checks.append((f"{name}, {share}: of {other}", ours / times[f"{other}, {share}"], 1.0))
                rows += [(text, backend, bound, ratio) for text, ratio, bound in checks]
        gates = result["gates"]
        without, with_block = gates["without the block"], gates["with the block"]
        skipped = gates[f"{OURS}, skipped in every other step"]
        half = (skipped - without) / ((with_block - without) / 2)
        rows.append(("skipped every other step: of half the block's time", backend, 1.05, half))
    cells = [
        (t, b, f"at most {bound:g}", f"{r:.2f}", "reached" if r <= bound else "not reached") for t, b, bound, r in rows
    ]
    return Table(
        "Goals, and what this run reached", ("goal", "backend", "bound", "here", ""), cells, right=("bound", "here")
    )


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, measured, tables, goals))
