"""Run the whole suite once per backend, each in its own process, and print one summary.

python tests/run.py [--long] [BACKEND ...] [-- pytest arguments]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

BACKENDS = ("tensorflow", "torch", "jax")
ROOT = Path(__file__).parent.parent


def run(backend: str, arguments: list[str], folder: Path) -> dict:
    report = folder / f"{backend}.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-p", "no:cacheprovider", *arguments]
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "FINETOOTH_TEST_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - start
    print(f"\n=== {backend}: {seconds:.0f} s\n{done.stdout[-30_000:]}\n{done.stderr[-3_000:]}", flush=True)
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    if report.exists():
        for suite in ElementTree.parse(report).iter("testsuite"):
            for name in counts:
                counts[name] += int(suite.get(name, 0))
    return {"backend": backend, "seconds": seconds, "code": done.returncode, **counts}


def main() -> int:
    arguments = sys.argv[1:]
    extra = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    named = [a for a in arguments[: len(arguments) - len(extra)] if a in BACKENDS] or list(BACKENDS)
    marks = ["-m", "long" if "--long" in arguments else "not long"]
    workers = max(1, min(len(named), os.cpu_count() or 1))
    with TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda backend: run(backend, [*marks, *extra], Path(folder)), named))
    print(f"\n{'backend':<12}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for r in results:
        failed = r["failures"] + r["errors"]
        passed = r["tests"] - failed - r["skipped"]
        print(f"{r['backend']:<12}{passed:>8}{failed:>8}{r['skipped']:>9}{r['seconds']:>9.0f}")
    failed = sum(r["failures"] + r["errors"] for r in results)
    passed = sum(r["tests"] - r["skipped"] for r in results) - failed
    print(f"\n{passed} passed, {failed} failed, {sum(r['skipped'] for r in results)} skipped")
    return 0 if all(r["code"] == 0 for r in results) and passed else 1


if __name__ == "__main__":
    sys.exit(main())
