"""Run the tests on every backend, in processes that know one backend each, and print one summary.

    python tests/run.py [--all | --rest] [BACKEND ...] [-- pytest arguments]

Without an option: the core, in a few minutes. `--rest`: what is marked `long`. `--all`: both.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

BACKENDS = ("jax", "tensorflow", "torch")  # the longest first
ROOT = Path(__file__).parent.parent
# A backend's tests share some processes: what TensorFlow keeps of all that it has traced makes a long one slow.
SHARES = 4
LIMIT = 1800  # seconds for one process; a single test has its own, shorter one in pyproject.toml
COLUMNS = {"passed": 8, "failed": 8, "skipped": 9, "seconds": 9}  # of the summary, with their widths

# Tests compare numbers that CPUs compute, unless the environment says otherwise.
DEVICES = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "KERAS_TORCH_DEVICE": "cpu"}
SETTINGS = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    # What one test has had compiled need not be compiled for the next, nor in the next run.
    "JAX_COMPILATION_CACHE_DIR": str(Path(sys.prefix) / "cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
# Compiling takes most of the core's time on JAX.
CORE = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


class Processes:
    """The processes that run now. After `stop` none runs, and none can be started."""

    def __init__(self) -> None:
        self.lock, self.running, self.stopped = Lock(), set[subprocess.Popen[str]](), False

    def run(self, command: list[str], environment: dict[str, str]) -> tuple[int, str]:
        """Run one process, LIMIT seconds at most: its exit code and what it printed."""
        with self.lock:
            if self.stopped:
                return -signal.SIGTERM, ""
            process = subprocess.Popen(  # in a session of its own, so that it ends with all that it has started
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            self.running.add(process)
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.kill(process)
            output = process.communicate()[0] + f"\nstopped after {LIMIT} s"
        with self.lock:
            self.running.discard(process)
        return process.returncode, output

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for process in self.running:
                self.kill(process)

    @staticmethod
    def kill(process: subprocess.Popen[str]) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended by itself
            pass


def shares(arguments: list[str]) -> list[list[str]]:
    """The suite in pieces of about the same size; one, if paths are given."""
    if any((ROOT / argument.split("::")[0]).exists() for argument in arguments):
        return [[]]
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    return [["src", *files[::SHARES]], *(files[start::SHARES] for start in range(1, SHARES))]


def marks(backend: str, backends: list[str], options: list[str]) -> list[str]:
    """Which tests a backend runs. Those that need no backend are run by the last one."""
    wanted = [] if "--all" in options else ["long" if "--rest" in options else "not long"]
    wanted += [] if backend == backends[-1] else ["not numpy"]
    return ["-m", " and ".join(wanted)] if wanted else []


def run(
    processes: Processes, backend: str, paths: list[str], arguments: list[str], report: Path
) -> tuple[str, Counter[str], bool]:
    """Run some of the tests on one backend: their numbers, and whether all is well."""
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-p", "no:cacheprovider"]
    environment = DEVICES | os.environ | SETTINGS | {"KERAS_BACKEND": backend, "FINETOOTH_TEST_BACKEND": backend}
    environment |= {} if {"--all", "--rest"} & set(sys.argv) else CORE
    start = time.monotonic()
    code, output = processes.run([*command, *arguments, *paths], environment)
    seconds = time.monotonic() - start
    what = f"{len(paths)} paths from {paths[0]} on" if paths else "as asked"
    print(f"\n=== {backend}, {what}: {seconds:.0f} s, exit code {code}\n{output[-30_000:]}", flush=True)
    counts: Counter[str] = Counter(seconds=round(seconds))
    if report.exists():
        for suite in ElementTree.parse(report).iter("testsuite"):
            counts.update({name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")})
    return backend, counts, code in (0, 5)  # 5: none of its tests was asked for


def summary(totals: dict[str, Counter[str]]) -> bool:
    """Print the numbers of all backends; whether each has passed something."""
    print(f"\n{'backend':<12}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
    for backend, counts in totals.items():
        counts["failed"] = counts["failures"] + counts["errors"]
        counts["passed"] = counts["tests"] - counts["failed"] - counts["skipped"]
        print(f"{backend:<12}" + "".join(f"{counts[n]:>{w}}" for n, w in COLUMNS.items()))
    sums = (f"{sum(counts[n] for counts in totals.values())} {n}" for n in ("passed", "failed", "skipped"))
    print("\n" + ", ".join(sums))
    return all(counts["passed"] for counts in totals.values())  # a backend that ran nothing is none that passed


def main() -> int:
    arguments = sys.argv[1:]
    extra = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    unknown = set(options) - {*BACKENDS, "--all", "--rest"}
    if unknown:
        print(f"Unknown: {', '.join(sorted(unknown))}.\n{__doc__}")
        return 2
    backends = [option for option in options if option in BACKENDS] or list(BACKENDS)
    totals: dict[str, Counter[str]] = {backend: Counter() for backend in backends}
    well = True
    processes = Processes()
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # both raise KeyboardInterrupt
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs = [(backend, paths) for backend in backends for paths in shares(extra)]
        futures = [
            pool.submit(
                run, processes, backend, paths, [*marks(backend, backends, options), *extra], Path(folder, f"{n}.xml")
            )
            for n, (backend, paths) in enumerate(jobs)
        ]
        try:
            for future in futures:
                backend, counts, succeeded = future.result()
                totals[backend] += counts
                well = well and succeeded
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.stop()
            print("\ninterrupted")
            return 130
    return 0 if summary(totals) and well else 1


if __name__ == "__main__":
    sys.exit(main())
