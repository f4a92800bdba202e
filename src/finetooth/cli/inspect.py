"""`finetooth inspect`: the weights of a saved model, or what a selection of them holds. Imported once Keras runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
from rich.console import Console

from ..display.format import size
from ..display.table import Table
from ..keras_internals.weights import selectable, to_numpy, weights_by_path
from ..selection.select import select
from .start import load


def run(path: Path, selections: Sequence[str], console: Console) -> None:
    """Print a table of the weights of a `.keras` file or, if there are selections, of their union."""
    model = load(path)
    table = select(model, *selections).table() if selections else weights_table(model)
    # As wide as the terminal; piped, as wide as the table needs.
    console.print(table) if console.is_terminal else print(table)


def weights_table(model: keras.Model) -> Table:
    """Make the table of every weight of the model, with totals."""
    trainable = selectable(model)
    values = {path: to_numpy(variable) for path, variable in weights_by_path(model).items()}
    rows = [
        (path, str(value.shape), str(value.dtype), f"{value.size:,}", _kind(value, trainable.get(path)))
        for path, value in values.items()
    ]
    elements, total_bytes = sum(v.size for v in values.values()), sum(v.nbytes for v in values.values())
    selectable_elements = sum(values[path].size for path in trainable)
    return Table(
        title=f"Weights of {model.name!r}",
        columns=("variable", "shape", "dtype", "elements", "kind"),
        rows=rows,
        right=("elements",),
        caption=(
            f"{len(rows):,} variables, {elements:,} elements, {size(total_bytes)}",
            f"a selection can hold {selectable_elements:,} of them: those of kind trainable or frozen",
        ),
    )


def _kind(value: Any, trained: Any) -> str:
    """Name the kind of a variable: trained by gradients, frozen, or not trainable at all."""
    if trained is not None:
        return "trainable" if trained.trainable else "frozen"
    return "integer" if value.dtype.kind in "iub" else "statistic"
