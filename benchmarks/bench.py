"""What a step costs, against the alternatives in the same run: one process per backend, interleaved repeats.

    python benchmarks/bench.py [BACKEND ...] [--quick] [--only WORKLOAD ...] [--json FILE] [--plot FILE]

Each contender of a workload trains the same model from the same weights on the same batches, with Adam. Those that say
"own loop", the floors written by hand and the libraries of others run in a plain loop of their backend, the rest
through stock `fit`. A round runs one epoch of every contender in turn; the first round, which compiles, is counted
apart. The table shows:

    ms/step       the median of the rounds; what a call of `fit` does before its epoch begins is not in it
    spread        the slowest round over the fastest
    x first       the median, relative to the first contender's
    compile s     how much longer the first epoch took
    state         the elements that the optimizer keeps beside the weights
    peak MiB      memory for building and training, in a process of its own, beyond that of the imports
    frozen moved  how many of the weights that this way promises to freeze have changed any bit
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BACKENDS = ("tensorflow", "jax", "torch")
PACKAGES = {
    "tensorflow": ("tensorflow-cpu", "keras", "numpy"),
    "jax": ("jax", "optax", "keras", "numpy"),
    "torch": ("torch", "peft", "transformers", "keras", "numpy"),
}
PEERS = {"jax": "peers_jax", "torch": "peers_torch"}
BUILD = Path(__file__).parent.parent / "build"


def main() -> int:
    arguments = parsed()
    if arguments.one:
        arguments.json.write_text(json.dumps(measured(arguments.one, arguments.quick, arguments.only)))
        return 0
    from goals import goals_table
    from plot import plot
    from report import tables

    start = time.perf_counter()
    results = {}
    for backend in arguments.backends or BACKENDS:
        results[backend] = in_process(backend, arguments)
        print(tables(backend, results[backend]), flush=True)
    print(f"\n{goals_table(results)}")
    facts = {"machine": machine(), "seconds": time.perf_counter() - start, "backends": results}
    for path in (arguments.json, arguments.plot):
        path.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(facts, indent=1))
    plot(results, arguments.plot)
    print(f"\n{facts['machine']}. {facts['seconds']:.0f} seconds. Wrote {arguments.json} and {arguments.plot}.")
    rows = [row for r in results.values() for w in r["workloads"].values() for row in w["contenders"].values()]
    return int(any("error" in row for row in rows))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", choices=[*BACKENDS, []], help="default: all three")
    parser.add_argument("--quick", action="store_true", help="fewer workloads, contenders and rounds; no memory")
    parser.add_argument("--only", nargs="+", metavar="WORKLOAD", help="these workloads only")
    parser.add_argument("--json", type=Path, default=BUILD / "bench.json", help="where the numbers go")
    parser.add_argument("--plot", type=Path, default=BUILD / "bench.png", help="where the plot goes")
    parser.add_argument("--one", choices=BACKENDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_process(backend: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All the measurements of one backend, taken in a process of its own."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--one", backend, "--json", str(file)]
        command += ["--quick"] if arguments.quick else []
        command += ["--only", *arguments.only] if arguments.only else []
        # Backends talk on the error stream, about themselves; it matters only when they fail.
        with (Path(folder) / "errors").open("w+") as errors:
            done = subprocess.run(command, env=environment, stderr=errors)
            if done.returncode:
                errors.seek(0)
                sys.exit(f"{errors.read()}\n{backend} failed with status {done.returncode}.")
        return json.loads(file.read_text())


def measured(backend: str, quick: bool, only: list[str] | None) -> dict[str, Any]:
    from measure import peak_memory, released, timed
    from workloads import all_workloads

    workloads = {workload.name: workload for workload in all_workloads()}
    peers = importlib.import_module(PEERS[backend]).contenders() if backend in PEERS else {}
    if only and not set(only) <= set(workloads):
        sys.exit(f"There is no workload {', '.join(set(only) - set(workloads))}; there are {', '.join(workloads)}.")
    chosen = [workloads[name] for name in only or workloads if only or not quick or workloads[name].quick]
    makes = {}
    for workload in chosen:
        every = workload.contenders | peers.get(workload.name, {})
        few = workload.quick if quick and workload.quick else every
        makes[workload.name] = {name: make for name, make in every.items() if name in few}
    peaks: dict[str, dict[str, float | None]] = {workload.name: {} for workload in chosen}
    for workload in chosen if not quick else []:  # before anything is computed in this process
        data = workload.data(3)
        for name, make in makes[workload.name].items():
            if name in workload.memory:
                progress(f"{backend}: memory, {workload.name}, {name}")
                peaks[workload.name][name] = peak_memory(make, data)
    results = {}
    for workload in chosen:
        progress(f"{backend}: {workload.name}")
        start = time.perf_counter()
        data = workload.data(workload.steps // 2 if quick else workload.steps)
        rows = timed(makes[workload.name], data, 3.0 if quick else 15.0)
        for name, row in rows.items():
            row["peak_mib"] = peaks[workload.name].get(name)
        seconds = time.perf_counter() - start
        results[workload.name] = {"title": workload.title, "contenders": rows, "seconds": seconds}
        released()
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES[backend])
    return {"versions": versions, "workloads": results}


def progress(text: str) -> None:
    print(f"{text} ...", flush=True)


def machine() -> str:
    return f"{processor()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
