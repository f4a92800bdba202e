"""What finetooth aims at on a GPU. Reported, not enforced: times depend on the machine."""

from __future__ import annotations

from typing import Any

import keras
from goals import Goal, faster, within

from finetooth.display.table import Table

BACKEND = keras.backend.backend()
BOTH, TORCH = ("jax", "torch"), ("torch",)
FLOOR, LORA, MASKED = "biases only (floor)", "factored LoRA", "masked gradient + Adam"
ROWS, COLUMNS, TOKENS = "finetooth, 5% rows", "finetooth, 5% columns", "finetooth, 10 rows"
FUSED, PEFT = "finetooth, fused AdamW", "PEFT LoRA, fused AdamW"


def smaller(group: str, than: str, times: float, ours: str, backends: tuple[str, ...] = BOTH) -> Goal:
    return Goal(group, "", ours, than, backends, at_most=times, measure="peak_mib")


GOALS = [
    within("dense", FLOOR, 1.05, BOTH, ROWS),
    within("dense", FLOOR, 1.10, BOTH, COLUMNS),
    faster("dense", LORA, 1.0, BOTH, ROWS),
    faster("dense", LORA, 1.0, BOTH, COLUMNS),
    within("dense-few", FLOOR, 1.08, BOTH, ROWS),
    within("dense-few", FLOOR, 1.15, BOTH, COLUMNS),
    within("embedding", "frozen table (floor)", 1.15, BOTH, TOKENS),
    smaller("embedding", "frozen table (floor)", 1.1, TOKENS),
    *(within("points", FLOOR, 1.2, BOTH, f"finetooth, blocks of {side}") for side in (64, 128, 256)),
    *(faster("points", MASKED, 1.4, BOTH, f"finetooth, blocks of {side}") for side in (64, 128, 256)),
    within("points", "dense gradient by hand, 1%", 1.03, BOTH, "finetooth, 1%"),
    within("points", "dense gradient by hand, 0.1%", 1.03, BOTH, "finetooth, 0.1%"),
    faster("llama", "full AdamW", 1.5, BOTH, "finetooth"),
    faster("llama", "full, fused AdamW", 1.5, TORCH, FUSED),
    faster("llama", "transformers full, fused AdamW", 1.5, TORCH, FUSED),
    faster("llama", LORA, 1.05, BOTH, "finetooth"),
    faster("llama", PEFT, 1.05, TORCH, FUSED),
    smaller("llama", LORA, 0.95, "finetooth"),
    smaller("llama", PEFT, 0.95, FUSED, TORCH),
]


def goals_table(group: str, rows: dict[str, dict[str, Any]]) -> Table | None:
    """The goals of a group, and what was reached; None where nothing of them was measured."""
    lines = []
    for goal in GOALS:
        ratio = goal.reached(rows) if goal.workload == group and BACKEND in goal.backends else None
        if ratio is not None:
            what = "time" if goal.measure == "ms" else "memory"
            verdict = "reached" if goal.kept(ratio) else "not reached"
            lines.append((what, goal.over, goal.under, goal.bound(), f"{ratio:.3f}", verdict))
    columns = ("", "of", "over that of", "goal", "here", " ")
    return Table(title="Goals", columns=columns, rows=lines, right=("goal", "here")) if lines else None
