"""What it costs to update some elements of a variable, and the rows of a table that a batch used.

    python benchmarks/parts.py [BACKEND ...] [--json FILE]

Updates: the same elements of a matrix are written with new values, by `ft.Part` and by what the backend offers, and the
matrix is multiplied with a thin one afterwards. The two are timed apart and as a pair, since a cheap write can make the
next read dear. Tables: a step of lazy Adam (look-up, squared error, gradient, update) by `ft.LazyOptimizer`, by stock
Keras and by hand, and the memory that it takes for the time being (a table of 200,000 rows is 48.8 MiB).
One process per backend; contenders take turns, and the median of the rounds counts.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from per_backend import main, progress

ROUNDS, SECONDS = 7, 0.04  # of each contender; how long it runs in a round
WIDTH = 1000
SIZES = (10**5, 10**6, 10**7, 10**8, 5 * 10**8)
OURS, BY_HAND = "finetooth", "lazy Adam by hand"


def regions(size: int) -> dict[str, tuple[tuple[int, int], Any]]:
    """10,000 elements of each kind, however large the matrix is: its shape, and an index."""
    import numpy as np

    rng = np.random.default_rng(0)
    length = size // WIDTH
    tall, wide = (length, WIDTH), (WIDTH, length)
    few = np.sort(rng.choice(length, 10, replace=False))
    middle = length // 2
    points = np.zeros(tall, bool)
    points.reshape(-1)[rng.choice(size, 10_000, replace=False)] = True
    return {
        "10 rows": (tall, few),
        "10 rows side by side": (tall, np.s_[middle : middle + 10, :]),
        "10 columns": (wide, np.s_[:, few]),
        "10 columns side by side": (wide, np.s_[:, middle : middle + 10]),
        "block of 100 x 100": (tall, np.s_[middle : middle + 100, 100:200] if length > 200 else np.s_[:100, 100:200]),
        "10,000 points": (tall, points),
    }


def measured(backend: str) -> dict[str, Any]:
    from workloads import available_memory

    native = importlib.import_module(f"parts_{backend}")
    results: dict[str, Any] = {"updates": {}, "sizes": {}, "tables": {}}
    shape = (4096, 4096)
    import numpy as np

    chosen = np.sort(np.random.default_rng(0).choice(4096, 41, replace=False))
    cases = {
        "1% of the rows": np.s_[chosen],
        "1% of the columns": np.s_[:, chosen],
        "41 columns side by side": np.s_[:, 100:141],
        "block of 512 x 512": np.s_[512:1024, 512:1024],
        "1% of the elements": np.random.default_rng(1).random(shape) < 0.01,
    }
    for name, index in cases.items():
        progress(f"{backend}: {name} of {shape[0]} x {shape[1]}")
        results["updates"][name] = timed_pairs(native.updates(shape, index))
    for size in SIZES:
        if 4 * 4 * size > available_memory():
            continue
        progress(f"{backend}: {size:,} elements")
        for name, (shape, index) in regions(size).items():
            row = results["sizes"].setdefault(name, {})
            # One after the other: there is memory for one of the largest. The smallest matrix says who takes part.
            for contender in list(row) or native.updates(shape, index):
                update, _ = native.updates(shape, index, only=contender)[contender]
                row.setdefault(contender, {})[size] = timed({contender: update})[contender]
    for rows in (20_000, 200_000, 2_000_000):
        progress(f"{backend}: table of {rows:,} rows")
        few = rows != 200_000  # what dense optimizers do is measured once
        steps = native.table_steps(rows, 64, 1280, only=(OURS, BY_HAND) if few else ())
        results["tables"][rows] = timed(steps)
        if not few:
            results["memory"] = {name: temporary_memory(step) for name, step in steps.items()}
    return results


def temporary_memory(step: Callable[[], Any]) -> float | None:
    """How many MiB a step takes for the time being, beyond what is there before it; None where nobody says."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
        before = _status("VmRSS")
        step()
        return max(0.0, _status("VmHWM") - before) / 1024
    except OSError:
        return None


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name))


def timed_pairs(contenders: Mapping[str, tuple[Callable[[], Any], Callable[[], Any]]]) -> dict[str, dict[str, float]]:
    """Milliseconds for the update, for the read, and for both in turn."""
    columns: dict[str, dict[str, Callable[[], Any]]] = {"update": {}, "pair": {}}
    for name, (update, read) in contenders.items():
        columns["update"][name] = update
        columns["pair"][name] = lambda update=update, read=read: (update(), read())
    found = {column: timed(functions) for column, functions in columns.items()}
    return {name: {column: found[column][name] for column in found} for name in contenders}


def timed(functions: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds for a call, the median of the rounds."""
    counts = {}
    for name, function in functions.items():
        function()
        start = time.perf_counter()
        function()
        counts[name] = max(1, int(SECONDS / (time.perf_counter() - start)))
    rounds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                function()
            rounds[name].append((time.perf_counter() - start) / counts[name])
    return {name: 1000 * statistics.median(times) for name, times in rounds.items()}


def tables(backend: str, result: dict[str, Any]) -> list[str]:
    from finetooth.display.table import Table

    shown = []
    for case, rows in result["updates"].items():
        ours = rows[OURS]
        cells = [
            (name, f"{row['update']:.3f}", f"{row['update'] / ours['update']:.1f}", f"{row['pair']:.3f}",
             f"{row['pair'] / ours['pair']:.2f}")
            for name, row in rows.items()
        ]  # fmt: skip
        columns = ("", "update ms", "x finetooth", "update + product ms", "x finetooth")
        shown.append(Table(f"{backend}: {case} of 4096 x 4096", columns, cells, right=columns[1:]))
    for case, contenders in result["sizes"].items():
        sizes = list(contenders[OURS])
        cells = [(name, *(f"{row[size]:.3f}" for size in sizes), _spread(row)) for name, row in contenders.items()]
        columns = ("", *(f"{int(size):,}" for size in sizes), "last / first")
        shown.append(
            Table(f"{backend}: ms to update {case} of a variable, by its size", columns, cells, right=columns[1:])
        )
    columns = ("", *(f"{int(rows):,} rows" for rows in result["tables"]), "temporary MiB")
    names = list(result["tables"]["200000"])
    cells = [
        (
            name,
            *(f"{row[name]:.3f}" if name in row else "-" for row in result["tables"].values()),
            "-" if result["memory"][name] is None else f"{result['memory'][name]:.1f}",
        )
        for name in names
    ]
    shown.append(Table(f"{backend}: ms for a step of Adam, 1,280 look-ups of 64", columns, cells, right=columns[1:]))
    return [str(table) for table in shown]


def goals(results: Mapping[str, Any]) -> Any:
    """What finetooth aims at, and what this run reached. Reported, not enforced."""
    from finetooth.display.table import Table

    found: list[tuple[str, str, str, float, bool]] = []

    def add(text: str, backend: str, ratio: float, at_most: float | None = None, at_least: float | None = None) -> None:
        bound = f"at most {at_most:g}" if at_most else f"at least {at_least:g}"
        found.append((text, backend, bound, ratio, ratio <= at_most if at_most else ratio >= (at_least or 0)))

    for backend, result in results.items():
        times = list(result["sizes"]["10 rows"][OURS].values())
        add("10 rows: the slowest size over the fastest", backend, max(times) / min(times), at_most=1.2)
        steps = result["tables"]
        flat = [steps[rows][OURS] for rows in steps]
        add("lazy step, 2 million rows over 20 thousand", backend, flat[-1] / flat[0], at_most=1.1)
        add("lazy step over lazy Adam by hand", backend, flat[1] / steps["200000"][BY_HAND], at_most=1.3)
        if backend == "tensorflow":
            update = result["updates"]["1% of the rows"]
            ratio = update["assign(tensor_scatter_nd_update)"]["update"] / update[OURS]["update"]
            add("1% of the rows, faster than assign(tensor_scatter_nd_update)", backend, ratio, at_least=20)
            add("lazy step, faster than Keras Adam", backend, steps["200000"]["Keras Adam"] / flat[1], at_least=20)
    columns = ("goal", "backend", "bound", "here", "")
    rows = [(t, b, bound, f"{ratio:.2f}", "reached" if kept else "not reached") for t, b, bound, ratio, kept in found]
    return Table("Goals, and what this run reached", columns, rows, right=("bound", "here"))


def _spread(row: Mapping[str, float]) -> str:
    times = list(row.values())
    return f"{times[-1] / times[0]:.2f}"


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, measured, tables, goals))
