"""What a step costs on one GPU, on JAX or PyTorch.

    KERAS_BACKEND=torch python benchmarks/gpu.py [GROUP ...] [--only TEXT ...] [--alone] [--tiny] [--json FILE]

Data stays on the device and steps run back to back, so that what is measured is the step: on JAX compiled and with its
state donated, as in `fit`; on PyTorch eager. The contenders of a group are built one by one and then take turns: a
round is some steps of each of them. Weights are bfloat16, and so is the optimizer's state, where a contender does not
choose otherwise: finetooth's parts are float32. The table shows:

    ms/step       the median of the rounds
    x floor       the same, relative to the group's first contender, the least that a step can cost
    peak MiB      weights, optimizer state, data and everything else that is alive during a step: on PyTorch the most
                  that was allocated, on JAX what the compiled step needs (arguments + new results + temporaries)
    trained       the elements that the optimizer is given
    frozen moved  how many of the weights that this way promises to freeze have changed any bit
    ready s       for building, preparing, compiling and the first three steps
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import keras
from gpu.goals import goals_table
from gpu.groups import TINY, Group, Sizes, groups
from gpu.measure import measured
from gpu.optimizers import RATE
from gpu.run import backend

import finetooth
from finetooth.display.table import Table

NAMES = ("dense", "dense-few", "embedding", "points", "llama")
COLUMNS = ("", "ms/step", "x floor", "peak MiB", "trained", "frozen moved", "ready s")


def main() -> int:
    arguments = parsed()
    facts = {"versions": versions(), "device": backend.device_name(), "tiny": arguments.tiny, "groups": {}}
    print(f"{facts['device']}: {facts['versions']}", flush=True)
    if arguments.tiny:
        print("Tiny: this shows that everything runs. The times mean nothing.")
    every = groups(TINY if arguments.tiny else Sizes())
    for name in arguments.groups or NAMES:
        group = replace(every[name], steps=2, rounds=2) if arguments.tiny else every[name]
        print(f"\n{name}: {group.title}", flush=True)
        rows = measured(group, chosen(group, arguments.only), arguments.alone)
        facts["groups"][name] = {"title": group.title, "contenders": rows}
        print(f"\n{table(name, rows)}\n\n{goals_table(name, rows) or ''}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(facts, indent=1))
    return int(any("error" in row for group in facts["groups"].values() for row in group["contenders"].values()))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", choices=[*NAMES, []], help=f"default: {', '.join(NAMES)}")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="the floor, and contenders whose names hold a TEXT")
    parser.add_argument("--alone", action="store_true", help="one contender on the device at a time, not in turns")
    parser.add_argument("--tiny", action="store_true", help="small, few steps: whether it runs, not what it costs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the numbers go, after each group")
    return parser.parse_args()


def versions() -> str:
    named = [f"Python {platform.python_version()}", f"finetooth {finetooth.__version__}"]
    for package in ("keras", keras.backend.backend(), "peft", "transformers"):
        try:
            named.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            named.append(f"no {package}")
    return ", ".join(named)


def chosen(group: Group, only: list[str] | None) -> list[str]:
    floor, *others = group.contenders
    return [floor, *(name for name in others if not only or any(text in name for text in only))]


def table(name: str, rows: dict[str, dict[str, Any]]) -> Table:
    floor = next(iter(rows.values())).get("ms")
    notes = [f"{contender}: {row['error']}" for contender, row in rows.items() if "error" in row]
    still = [contender for contender, row in rows.items() if row.get("trained_moved") == 0]
    if still:
        notes.append(f"Steps of {RATE:g} were rounded away in all of what these train: {'; '.join(still)}")
    return Table(
        title=f"{keras.backend.backend()}: {name}",
        columns=COLUMNS,
        rows=[(contender, *cells(row, floor)) for contender, row in rows.items()],
        right=COLUMNS[1:],
        caption=notes,
    )


def cells(row: dict[str, Any], floor: float | None) -> tuple[str, ...]:
    if "error" in row:
        return ("failed", *("",) * (len(COLUMNS) - 2))
    return (
        f"{row['ms']:.3f}",
        "-" if floor is None else f"{row['ms'] / floor:.3f}",
        "-" if row["peak_mib"] is None else f"{row['peak_mib']:,.1f}",
        f"{row['trained']:,}",
        "-" if row["moved"] is None else f"{row['moved']:,}",
        f"{row['ready_s']:.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
