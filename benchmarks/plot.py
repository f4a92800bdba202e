"""The measurements as a picture: a panel for each workload, step times relative to the first contender's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

COLOURS = {"tensorflow": "#e8833a", "jax": "#4c8bbf", "torch": "#7a5195"}
HEADING = 3  # the height of a panel's title and axis, in rows
FAR = 8  # a ratio from which a logarithmic axis shows more


def plot(results: dict[str, Any], path: Path) -> None:
    titles = {name: w["title"] for result in results.values() for name, w in result["workloads"].items()}
    names = {panel: _names(results, panel) for panel in titles}
    columns = _columns({panel: len(rows) + HEADING for panel, rows in names.items()})
    height = max(sum(len(names[panel]) + HEADING for panel in column) for column in columns)
    figure = plt.figure(figsize=(8 * len(columns), 0.46 * height + 0.8), layout="constrained")
    for part, column in zip(figure.subfigures(1, len(columns), squeeze=False)[0], columns):
        heights = [len(names[panel]) + HEADING for panel in column]
        axes = part.subplots(len(column), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, panel in zip(axes, column):
            _draw(axis, results, panel, names[panel])
            axis.set_title(f"{panel}: {titles[panel]}", fontsize=8.5, fontweight="bold", loc="left")
    marks = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[backend]) for backend in results]
    marks.append(plt.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="black", hatch="////"))
    figure.legend(marks, [*results, "moved frozen weights"], ncols=4, loc="outside upper center", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _names(results: dict[str, Any], panel: str) -> list[str]:
    """The contenders of a workload on any backend, each once, in order."""
    return list(dict.fromkeys(name for rows in _rows(results, panel).values() for name in rows))


def _rows(results: dict[str, Any], panel: str) -> dict[str, dict[str, Any]]:
    """What was measured of a workload, by backend and contender."""
    found = {backend: result["workloads"].get(panel, {}).get("contenders", {}) for backend, result in results.items()}
    return {backend: {n: r for n, r in rows.items() if "ms" in r} for backend, rows in found.items()}


def _columns(heights: dict[str, int]) -> list[list[str]]:
    """The panels in two columns of about the same height, in order; a single panel has one."""
    half = sum(heights.values()) / 2
    columns: list[list[str]] = [[], []]
    used = 0
    for panel, height in heights.items():
        columns[used + height / 2 > half].append(panel)
        used += height
    return [column for column in columns if column]


def _draw(axis: Any, results: dict[str, Any], panel: str, names: list[str]) -> None:
    """A row for each contender with a bar for each backend that has it; bars say how many milliseconds they are."""
    measured = _rows(results, panel)
    thick = 0.8 / len(results)
    longest = 1.0
    for backend, rows in measured.items():
        first = next(iter(rows.values()), None)
        for name, row in rows.items():
            having = [other for other in measured if name in measured[other]]
            middle = names.index(name) + thick * (having.index(backend) - (len(having) - 1) / 2)
            ratio = row["ms"] / first["ms"]
            longest = max(longest, ratio)
            hatch = "////" if row["moved"] else None
            axis.barh(middle, ratio, 0.92 * thick, color=COLOURS[backend], hatch=hatch, edgecolor="white", linewidth=0)
            label = axis.text(ratio, middle, f" {row['ms']:.3g} ms", va="center", fontsize=6.5)
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0})
    axis.set_xlim(0, longest * 1.12)
    if longest > FAR:
        axis.set_xscale("log", subs=(2, 5))
        axis.set_xlim(0.5, longest * 1.6)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("{x:g}")
    axis.axvline(1, color="black", linewidth=0.6, zorder=0.5)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.tick_params(axis="x", which="both", labelsize=7)
    axis.set_xlabel(f"step time, {names[0]} = 1", fontsize=7)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
