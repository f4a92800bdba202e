"""What finetooth aims at, and what a run reached. Reported, not enforced: times depend on the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetooth.display.table import Table

Rows = dict[str, dict[str, Any]]
ALL = ("tensorflow", "jax", "torch")


@dataclass(frozen=True)
class Goal:
    """The ratio of one contender's step time, or other measure, to another's, and its bound on these backends."""

    workload: str
    text: str
    over: str
    under: str
    backends: Sequence[str]
    at_least: float | None = None
    at_most: float | None = None
    measure: str = "ms"

    def reached(self, rows: Rows) -> float | None:
        """The ratio, or None where one of the two was not measured."""
        values = [rows.get(name, {}).get(self.measure) for name in (self.over, self.under)]
        return None if None in values else values[0] / values[1]

    def kept(self, ratio: float) -> bool:
        return ratio >= self.at_least if self.at_least is not None else ratio <= self.at_most

    def bound(self) -> str:
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"


def faster(workload: str, than: str, times: float, backends: Sequence[str] = ALL, ours: str = "finetooth") -> Goal:
    return Goal(workload, f"{ours}: times faster than {than}", than, ours, backends, at_least=times)


def within(workload: str, of: str, times: float, backends: Sequence[str] = ALL, ours: str = "finetooth") -> Goal:
    return Goal(workload, f"{ours}: time relative to {of}", ours, of, backends, at_most=times)


FLOOR = "biases only (floor)"
GOALS = [
    faster("slice", "masked gradient", 2.4, ["tensorflow"]),
    faster("slice", "Keras enable_lora(8)", 2.4, ["tensorflow"]),
    faster("slice", "masked gradient", 2.6, ["torch"]),
    faster("slice", "factored LoRA, r=8", 1.25, ["torch"]),
    faster("slice", "masked gradient", 1.8, ["jax"]),
    within("slice", "hand-written floor", 1.25),
    within("slice", "hand-written floor", 1.25, ours="finetooth, own loop"),
    within("slice", "hand-written floor", 1.25, ["tensorflow"], ours="finetooth, XLA"),
    within("transformer", FLOOR, 1.10, ["tensorflow"]),
    within("transformer", FLOOR, 1.15, ["jax", "torch"]),
    within("transformer", FLOOR, 1.20, ours="finetooth, scattered"),
    faster("rows", "PEFT TrainableTokens", 5, ["torch"]),
    faster("rows", "PEFT TrainableTokens", 5, ["torch"], ours="finetooth, own loop"),
    within("scaling", "finetooth, 32,000 rows", 1.1, ours="finetooth, 1,000,000 rows"),
    within("top", "trainable=False below", 1.05),
    faster("top", "finetooth", 4, ours="finetooth, cached prefix"),
    faster("top", "full", 4, ours="finetooth, cached prefix"),
    within("everything", "plain fit", 1.03),
]


def goals_table(results: dict[str, Any]) -> Table:
    rows = []
    for goal in GOALS:
        for backend in goal.backends:
            measured = results.get(backend, {}).get("workloads", {}).get(goal.workload)
            ratio = goal.reached(measured["contenders"]) if measured else None
            if ratio is not None:
                rows.append(
                    (goal.workload, goal.text, backend, goal.bound(), f"{ratio:.2f}", _verdict(goal.kept(ratio)))
                )
    for backend, result in results.items():
        ours = _ours(result)
        states = {row["state"] / row["given"] for row in ours}
        shown = ", ".join(f"{ratio:g}" for ratio in sorted(states))
        moved = sum(row["moved"] for row in ours)
        rows.append(("all", "optimizer state per trained element", backend, "2", shown, _verdict(states == {2})))
        rows.append(("all", "frozen elements moved", backend, "0", f"{moved:,}", _verdict(not moved)))
    return Table(
        title="Goals, and what this run reached",
        columns=("workload", "goal", "backend", "bound", "here", ""),
        rows=rows,
        right=("bound", "here"),
    )


def _ours(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What was measured of finetooth in every workload of a backend."""
    return [
        row
        for workload in result["workloads"].values()
        for name, row in workload["contenders"].items()
        if name.startswith("finetooth") and "error" not in row
    ]


def _verdict(reached: bool) -> str:
    return "reached" if reached else "not reached"
