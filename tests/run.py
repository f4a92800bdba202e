"""Run the whole suite on every backend, in processes that know one backend each, and print one summary.

python tests/run.py [--long] [BACKEND ...] [-- pytest arguments]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

BACKENDS = ("jax", "tensorflow", "torch")  # the longest first
ROOT = Path(__file__).parent.parent
# A backend's tests share some processes: what TensorFlow keeps of all that it has traced makes a long one slow.
SHARES = 4
COLUMNS = {"passed": 8, "failed": 8, "skipped": 9, "seconds": 9}  # of the summary, with their widths


def shares(arguments: list[str]) -> list[list[str]]:
    """The suite in pieces of about the same size; one, if paths are given."""
    if any((ROOT / argument.split("::")[0]).exists() for argument in arguments):
        return [[]]
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").glob("test_*.py"))]
    return [["src", *files[::SHARES]], *(files[start::SHARES] for start in range(1, SHARES))]


def run(backend: str, paths: list[str], arguments: list[str], report: Path) -> tuple[str, Counter[str], bool]:
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-p", "no:cacheprovider"]
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "FINETOOTH_TEST_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        # What one test has had compiled need not be compiled for the next.
        "JAX_COMPILATION_CACHE_DIR": str(report.parent / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    start = time.monotonic()
    done = subprocess.run([*command, *arguments, *paths], cwd=ROOT, env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - start
    what = f"{len(paths)} paths from {paths[0]} on" if paths else "as asked"
    print(f"\n=== {backend}, {what}: {seconds:.0f} s\n{done.stdout[-30_000:]}\n{done.stderr[-3_000:]}", flush=True)
    counts: Counter[str] = Counter(seconds=round(seconds))
    if report.exists():
        for suite in ElementTree.parse(report).iter("testsuite"):
            counts.update({name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")})
    return backend, counts, done.returncode in (0, 5)  # 5: none of its tests was asked for


def main() -> int:
    arguments = sys.argv[1:]
    extra = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    named = [a for a in arguments[: len(arguments) - len(extra)] if a in BACKENDS] or list(BACKENDS)
    marks = ["-m", "long" if "--long" in arguments else "not long"]
    totals: dict[str, Counter[str]] = {backend: Counter() for backend in named}
    well = True
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        jobs = [(backend, paths) for backend in named for paths in shares(extra)]
        reports = [Path(folder) / f"{number}.xml" for number in range(len(jobs))]
        for backend, counts, succeeded in pool.map(
            lambda job, report: run(*job, [*marks, *extra], report), jobs, reports
        ):
            totals[backend] += counts
            well = well and succeeded
    print(f"\n{'backend':<12}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items()))
    for backend, counts in totals.items():
        counts["failed"] = counts["failures"] + counts["errors"]
        counts["passed"] = counts["tests"] - counts["failed"] - counts["skipped"]
        well = well and counts["passed"] > 0  # a backend that ran nothing is none that passed
        print(f"{backend:<12}" + "".join(f"{counts[n]:>{w}}" for n, w in COLUMNS.items()))
    print(
        "\n" + ", ".join(f"{sum(counts[n] for counts in totals.values())} {n}" for n in ("passed", "failed", "skipped"))
    )
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
