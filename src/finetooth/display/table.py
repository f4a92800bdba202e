"""Tables for terminals, text and HTML. Every cell is data: no markup is read, control characters are spelled out."""

from __future__ import annotations

import html
import io
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text


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
        """Return the table as plain text, as wide as its contents need, up to 200 columns."""
        page = io.StringIO()
        # A notebook's console would show the table and write nothing.
        Console(file=page, width=200, color_system=None, force_terminal=False, force_jupyter=False).print(self)
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


def clean(text: str) -> str:
    """Spell out control and direction characters, so that a name cannot steer a terminal."""
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def share(part: int, whole: int) -> str:
    """Format a fraction as percent. Only nothing is 0% and only everything is 100%.

    >>> share(1, 8), share(3, 100_000), share(0, 5), share(1, 10**9), share(10**9 - 1, 10**9)
    ('12.5%', '0.003%', '0%', '<0.001%', '>99.9%')
    """
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 0.001:
        return "<0.001%"
    if 99.9 < percent < 100:
        return ">99.9%"
    return f"{percent:.3g}%"


def size(count: float) -> str:
    """Format a number of bytes in binary units.

    >>> size(512), size(2048), size(3.5 * 2**20)
    ('512 B', '2.0 KiB', '3.5 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise ValueError(count)


def _escape(text: str) -> str:
    return html.escape(clean(text), quote=True)
