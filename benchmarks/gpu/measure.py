"""How the contenders of a group are measured: built one by one, then timed in turns."""

from __future__ import annotations

import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from .groups import Group
from .run import Run, Task, backend

WARM = 3  # steps, the first of which compiles or loads kernels


@dataclass(frozen=True)
class Ready:
    """A contender that has made its first steps."""

    run: Run
    seconds: float  # for building it and for those steps
    peak: int | None


def measured(group: Group, names: list[str], alone: bool) -> dict[str, dict[str, Any]]:
    """A row of facts for each contender. They take turns, or each has the device to itself while it is measured."""
    backend.warm_up()
    task = group.task()
    rows: dict[str, dict[str, Any]] = {}
    for together in [[name] for name in names] if alone else [names]:
        rows |= in_turns(group, together, task)
        released()
    return rows


def in_turns(group: Group, names: list[str], task: Task) -> dict[str, dict[str, Any]]:
    built = {name: attempt(ready, name, group.contenders[name], task) for name in names}
    runs = {name: contender.run for name, contender in built.items() if isinstance(contender, Ready)}
    times = timed(runs, group.steps, group.rounds)
    rows = {name: attempt(facts, built[name], times[name]) if name in runs else built[name] for name in names}
    return {name: row if isinstance(row, dict) else {"error": row} for name, row in rows.items()}


def ready(name: str, make: Callable[[Task], Run], task: Task) -> Ready:
    gc.collect()
    before, start = backend.allocated(), time.perf_counter()
    run = make(task)
    for _ in range(WARM):
        backend.wait(run.step())
    seconds = time.perf_counter() - start
    peak = peak_of(run, task, before)
    shown = "" if peak is None else f", {peak / 2**20:,.0f} MiB"
    print(f"  {name}: ready after {seconds:.1f} s{shown}, {1000 * steps(run, 2) / 2:.3f} ms/step at first", flush=True)
    return Ready(run, seconds, peak)


def peak_of(run: Run, task: Task, before: int) -> int | None:
    """The bytes in use during a step, data included, but not what was in use before the contender was built."""
    if run.peak is not None:
        return run.peak
    gc.collect()
    most = backend.peak_of(lambda: steps(run, 2))
    data = sum(tensor.nbytes for tensor in task.data if tensor is not None)
    return None if most is None else most - before + data


def steps(run: Run, count: int) -> float:
    """The seconds that so many steps take, back to back."""
    start = time.perf_counter()
    result = None
    for _ in range(count):
        result = run.step()
    backend.wait(result)
    return time.perf_counter() - start


def timed(runs: dict[str, Run], count: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds per step, for each round; every round begins with another contender."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    gc.collect()
    gc.freeze()  # or the collector goes through all the models again and again
    for turn in range(rounds):
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            lap = attempt(settled_lap, runs[name], count)
            times[name] += [lap] if isinstance(lap, float) else []
    gc.unfreeze()
    return times


def settled_lap(run: Run, count: int) -> float:
    steps(run, 2)  # clocks and caches have followed another contender
    return 1000 * steps(run, count) / count


def facts(contender: Ready, times: list[float]) -> dict[str, Any]:
    run, moved = contender.run, contender.run.moved()
    if not times:
        raise RuntimeError("it failed in every round")
    return {
        "ms": statistics.median(times),
        "rounds_ms": times,
        "peak_mib": None if contender.peak is None else contender.peak / 2**20,
        "trained": run.given,
        "trained_moved": moved.trained,
        "moved": moved.frozen if run.freezes else None,
        "ready_s": contender.seconds,
    }


def attempt(run: Callable[..., Any], *args: Any) -> Any:
    """What `run` gives, or, if it fails, why: one contender must not take the others with it."""
    try:
        return run(*args)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return f"{type(error).__name__}: {error}".splitlines()[0]


def released() -> None:
    """Nothing of what was measured stays on the device."""
    keras.backend.clear_session()
    gc.collect()
    backend.free()
