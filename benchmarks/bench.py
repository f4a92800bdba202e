"""What a step costs, against the alternatives in the same run: one process per backend, interleaved repeats.

    python benchmarks/bench.py [BACKEND ...] [--quick] [--json FILE]

Each contender trains the same model on the same batches through stock `fit`. A round runs one epoch of every contender
in turn; the first round, which compiles, is not counted. The table shows the median step time, the spread of the rounds
(largest over smallest), the ratio to finetooth, and how many weights that should be frozen moved.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

BACKENDS = ("tensorflow", "jax", "torch")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", choices=[*BACKENDS, []], help="default: all three")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--one", choices=BACKENDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(rounds=3 if arguments.quick else 7)))
        return 0
    results = {}
    for backend in arguments.backends or BACKENDS:
        command = [sys.executable, __file__, "--one", backend, *(["--quick"] if arguments.quick else [])]
        environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        results[backend] = json.loads(done.stdout.strip().splitlines()[-1])
        show(backend, results[backend])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0


def show(backend: str, result: dict) -> None:
    print(f"\n{backend}: {result['versions']}, {result['machine']}")
    for workload, contenders in result["workloads"].items():
        print(f"\n  {workload}")
        print(f"  {'':<34}{'ms/step':>9}{'spread':>8}{'x finetooth':>13}{'state':>12}{'frozen moved':>14}")
        ours = contenders["finetooth"]["ms"]
        for name, row in contenders.items():
            moved = "-" if row["moved"] is None else f"{row['moved']:,}"
            state = f"{row['state']:,}"
            print(f"  {name:<34}{row['ms']:>9.2f}{row['spread']:>8.2f}{row['ms'] / ours:>13.2f}{state:>12}{moved:>14}")


def measure(rounds: int) -> dict:
    import keras
    from workloads import WORKLOADS

    workloads = {}
    for workload in WORKLOADS:
        contenders = {name: make() for name, make in workload.contenders.items()}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for round_number in range(rounds + 1):
            for name, contender in contenders.items():
                seconds = epoch(contender.fit)
                if round_number:
                    times[name].append(1000 * seconds / workload.steps)
        workloads[workload.name] = {
            name: {
                "ms": statistics.median(times[name]),
                "spread": max(times[name]) / min(times[name]),
                "state": contender.state(),
                "moved": contender.moved(),
            }
            for name, contender in contenders.items()
        }
    backend = sys.modules[keras.backend.backend()]
    return {
        "versions": f"keras {keras.__version__}, {backend.__name__} {backend.__version__}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "workloads": workloads,
    }


def epoch(fit: Callable[[], None]) -> float:
    start = time.perf_counter()
    fit()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
