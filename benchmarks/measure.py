"""How contenders are measured: rounds of one epoch each, and peak memory in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import statistics
import sys
import time
import traceback
import warnings
from typing import Any

import keras
from contenders import Contender, Data
from workloads import Make

LEAST, MOST = 3, 9  # rounds


def timed(makes: dict[str, Make], data: Data, seconds: float) -> dict[str, dict[str, Any]]:
    """Rounds of one epoch of every contender in turn, as many as fit into the time.

    Each round begins with another contender. The first round, which compiles, is counted apart.
    """
    rows: dict[str, dict[str, Any]] = {}
    contenders: dict[str, Contender] = {}
    first: dict[str, float] = {}
    for name, make in makes.items():
        try:
            contender = make(data)
            start = time.perf_counter()
            contender.epoch()
            first[name] = time.perf_counter() - start
            contenders[name] = contender
        except Exception as error:  # one contender must not take the others with it
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            rows[name] = {"error": reason, "traceback": traceback.format_exc()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    names = list(contenders)
    for count in range(MOST if names else 0):
        if count >= LEAST and time.perf_counter() > end:
            break
        turn = count % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(contenders[name].epoch())
    for name, contender in contenders.items():
        rows[name] = facts(contender, first[name], times[name])
    return {name: rows[name] for name in makes}


def facts(contender: Contender, first: float, times: list[float]) -> dict[str, Any]:
    median = statistics.median(times)
    return {
        "ms": 1000 * median / contender.steps,
        "steps": contender.steps,
        "spread": max(times) / min(times),
        "rounds": len(times),
        "compile_s": max(0.0, first - median),
        "epoch_s": median,
        "once_s": contender.once,
        "given": contender.given(),
        "state": contender.state(),
        "moved": contender.moved(),
    }


def released() -> None:
    """Before the next workload: nothing of the last one stays in memory."""
    keras.backend.clear_session()
    gc.collect()


def peak_memory(make: Make, data: Data, limit: float = 180.0) -> float | None:
    """The peak memory, in MiB, of building a contender and one epoch of it, beyond what the process began with.

    It runs in a child that is forked before the backend has computed anything in this process, as its threads would
    not survive that. None where it fails or takes too long.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_report_peak, args=(make, data, sending))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of any fork
        child.start()
    sending.close()
    try:
        return receiving.recv() if receiving.poll(limit) else None
    except EOFError:
        return None
    finally:
        child.kill()
        child.join()


def _report_peak(make: Make, data: Data, sending: Any) -> None:
    before = _peak()
    make(data).epoch()
    sending.send(_peak() - before)


def _peak() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
