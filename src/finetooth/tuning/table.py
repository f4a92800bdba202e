"""The table of a tuning. It needs no Keras: names, dtypes and rules come as text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..display.format import share, size
from ..display.table import Table
from ..selection.selection import Selection


@dataclass(frozen=True)
class PartFacts:
    """The dtype that a part is trained in, and how its gradient is computed."""

    dtype: str
    gradient: str


def tuning_table(
    title: str,
    selection: Selection,
    parts: Mapping[str, PartFacts],
    moving: Collection[str],
    lora: Collection[str],
) -> Table:
    """Return one row per variable with selected elements: what of it trains, and how.

    Args:
        title: The title of the table.
        selection: What trains.
        parts: By path, the variables that train by a part; others train as in plain Keras.
        moving: The paths of the statistics that move.
        lora: The paths of LoRA variables, selected or not.
    """
    rows, weights = [], selection.weights
    for path, region in selection.items():
        weight, part = weights[path], parts.get(path)
        dtype = weight.dtype if part is None or part.dtype == weight.dtype else f"{weight.dtype} as {part.dtype}"
        gradient = part.gradient if part else "own"
        rows.append((path, region.text(), f"{region.size:,}", share(region.size, weight.size), dtype, gradient))
    frozen = [path for path in lora if path not in selection]
    return Table(
        title=title,
        columns=("variable", "trains", "elements", "of it", "dtype", "gradient"),
        rows=rows,
        right=("elements", "of it"),
        caption=(
            f"trains {selection.size:,} of {selection.total:,} elements ({share(selection.size, selection.total)}); "
            f"{size(4 * selection.size)} for each optimizer slot, such as a momentum",
            "gradient: own, as in plain Keras; dense, of all of it, then gathered; any other, of the part alone",
            f"statistics that move: {', '.join(moving) or 'none'}",
            *([f"LoRA variables that stay frozen: {', '.join(frozen) or 'none'}"] if lora else []),
        ),
    )
