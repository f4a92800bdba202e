"""Parser of the text of an index, such as `[:, :64]`. Nothing is evaluated.

index  =  "[" entry { "," entry } "]"
entry  =  "..." | integer | [integer] ":" [integer] [ ":" [integer] ] | "[" integer { "," integer } "]"
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from ..errors import SelectionError

MAX_LENGTH = 4096
_TOKEN = re.compile(r"\s*(?:(?P<int>-?\d+)|(?P<dots>\.\.\.)|(?P<sign>[\[\],:]))")


class TextError(SelectionError):
    """Text that is not selection text; `str()` points at the column."""

    def __init__(self, text: str, column: int, problem: str):
        shown = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
        super().__init__(f"{problem} at column {column + 1}:\n  {shown}\n  {' ' * column}^")


def read_index(text: str, start: int = 0) -> tuple[Any, ...]:
    """Read the index that begins at a column of the text and ends with it.

    >>> read_index("[:, [1, 5]]")
    (slice(None, None, None), (1, 5))
    """
    return _Reader(text, start).read()


class _Reader:
    """Reads the bracketed index, token by token."""

    def __init__(self, text: str, start: int):
        self.text = text
        self.at = start
        self.column = start
        self.kind, self.value = "", ""
        self.advance()

    def advance(self) -> None:
        self.column = len(self.text) - len(self.text[self.at :].lstrip())
        match = _TOKEN.match(self.text, self.at)
        if match:
            self.kind, self.value = str(match.lastgroup), match.group(str(match.lastgroup))
            self.at = match.end()
            if self.kind == "int" and len(self.value.lstrip("-")) > 18:
                self.fail("An integer of at most 18 digits is expected")
        elif self.column >= len(self.text):
            self.kind, self.value = "end", "end of text"
        else:
            self.fail(f"Unexpected {self.text[self.column]!r} in an index")

    def fail(self, problem: str) -> NoReturn:
        raise TextError(self.text, self.column, problem)

    def expect(self, sign: str) -> None:
        if self.value != sign:
            self.fail(f"Expected {sign!r}, found {self.value!r}")
        self.advance()

    def read(self) -> tuple[Any, ...]:
        self.expect("[")
        entries = [self.entry()]
        while self.value == ",":
            self.advance()
            entries.append(self.entry())
        if self.value != "]":
            self.fail(f"Expected ',' or ']', found {self.value!r}")
        self.advance()
        if self.kind != "end":
            self.fail("Nothing may follow the closing bracket")
        return tuple(entries)

    def entry(self) -> Any:
        if self.kind == "dots":
            self.advance()
            return Ellipsis
        if self.value == "[":
            return self.listed()
        start = self.integer()
        if self.value != ":":
            if start is None:
                self.fail(f"Expected an integer, a slice, '...' or a list, found {self.value!r}")
            return start
        self.advance()
        stop, step = self.integer(), None
        if self.value == ":":
            self.advance()
            if self.kind == "int" and int(self.value) == 0:
                self.fail("A slice's step cannot be zero")
            step = self.integer()
        return slice(start, stop, step)

    def listed(self) -> tuple[int, ...]:
        self.expect("[")
        numbers = []
        while True:
            number = self.integer()
            if number is None:
                self.fail(f"Expected an integer, found {self.value!r}")
            numbers.append(number)
            if self.value != ",":
                break
            self.advance()
        self.expect("]")
        return tuple(numbers)

    def integer(self) -> int | None:
        if self.kind != "int":
            return None
        number = int(self.value)
        self.advance()
        return number
