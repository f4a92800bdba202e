"""Tables for terminals, text and HTML. Every cell is data: no markup is read, control characters are spelled out."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from .format import clean

WIDEST = 100_000  # characters: wider than any table


@dataclass(frozen=True)
class Table:
    """Rows of text under headings. Columns listed in `right` align right; `caption` lines stand below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()
    caption: Sequence[str] = ()

    def __rich__(self) -> RichTable:
        table = RichTable(
            title=Text(clean(self.title)),
            caption=Text("\n".join(clean(line) for line in self.caption)),
            box=SIMPLE_HEAD,
            title_justify="left",
            caption_justify="left",
            title_style="bold",
            caption_style="",
        )
        for column in self.columns:
            justify: Literal["left", "right"] = "right" if column in self.right else "left"
            table.add_column(Text(clean(column)), justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(clean(cell)) for cell in row))
        return table

    def __str__(self) -> str:
        """Return the table as plain text, as wide as its contents need."""
        page = io.StringIO()
        # A notebook's console would show the table and write nothing.
        Console(file=page, width=WIDEST, color_system=None, force_terminal=False, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in page.getvalue().splitlines()).strip("\n")

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{_escape(column)}</th>" for column in self.columns)
        styles = ["text-align:right" if column in self.right else "text-align:left" for column in self.columns]
        body = "".join(
            "<tr>" + "".join(f'<td style="{style}">{_escape(cell)}</td>' for style, cell in zip(styles, row)) + "</tr>"
            for row in self.rows
        )
        caption = "<br>".join(_escape(line) for line in self.caption)
        return (
            f"<table><caption><b>{_escape(self.title)}</b></caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table><p>{caption}</p>"
        )


class Shown:
    """Mixin for objects that are shown as their table: printed, in rich output and in notebooks."""

    def table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    def __rich__(self) -> RichTable:
        return self.table().__rich__()

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _escape(text: str) -> str:
    return html.escape(clean(text), quote=True)
