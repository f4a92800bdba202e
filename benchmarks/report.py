"""The measurements as tables."""

from __future__ import annotations

from typing import Any

from finetooth.display.table import Table

COLUMNS = ("", "ms/step", "spread", "x first", "compile s", "state", "peak MiB", "frozen moved")


def tables(backend: str, result: dict[str, Any]) -> str:
    """One table for each workload of a backend."""
    texts = [f"\n{backend}: {result['versions']}"]
    texts += [str(_table(name, workload)) for name, workload in result["workloads"].items()]
    return "\n\n".join(texts)


def _table(name: str, workload: dict[str, Any]) -> Table:
    rows = workload["contenders"]
    first = next(iter(rows.values()))
    caption = [f"{contender}: {row['error']}" for contender, row in rows.items() if "error" in row]
    caption += [
        f"{contender}: {row['once_s']:.2f} s once, then {row['epoch_s']:.2f} s for each epoch"
        for contender, row in rows.items()
        if row.get("once_s") is not None
    ]
    return Table(
        title=f"{name}: {workload['title']}",
        columns=COLUMNS,
        rows=[(contender, *_cells(row, first)) for contender, row in rows.items()],
        right=COLUMNS[1:],
        caption=caption,
    )


def _cells(row: dict[str, Any], first: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return ("failed", *("",) * 6)
    return (
        f"{row['ms']:.2f}",
        f"{row['spread']:.2f}",
        f"{row['ms'] / first['ms']:.2f}" if "ms" in first else "-",
        f"{row['compile_s']:.1f}",
        f"{row['state']:,}",
        f"{row['peak_mib']:,.0f}" if row.get("peak_mib") else "-",
        "-" if row["moved"] is None else f"{row['moved']:,}",
    )
