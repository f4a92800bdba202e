"""A benchmark that runs each backend in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BACKENDS = ("tensorflow", "jax", "torch")
BUILD = Path(__file__).parent.parent / "build"

Result = dict[str, Any]  # what was measured of one backend, fit for JSON


def main(
    script: str,
    description: str | None,
    measured: Callable[[str], Result],
    tables: Callable[[str, Result], list[str]],
    goals: Callable[[dict[str, Result]], Any],
) -> int:
    """The command line of a benchmark, which may also be the one that runs it for a single backend."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", choices=[*BACKENDS, []], help="default: all three")
    default = BUILD / f"{Path(script).stem}.json"
    parser.add_argument("--json", type=Path, default=default, help="where the numbers go")
    parser.add_argument("--one", choices=BACKENDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        arguments.json.write_text(json.dumps(measured(arguments.one)))
        return 0
    results = {}
    for backend in arguments.backends or BACKENDS:
        results[backend] = _in_process(backend, script)
        print("\n\n".join(["", *tables(backend, results[backend])]), flush=True)
    print(f"\n{goals(results)}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1))
    print(f"\nWrote {arguments.json}.")
    return 0


def progress(text: str) -> None:
    print(f"{text} ...", flush=True)


def _in_process(backend: str, script: str) -> Result:
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, script, "--one", backend, "--json", str(file)]
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{done.stderr}\n{backend} failed with status {done.returncode}.")
        return json.loads(file.read_text())
