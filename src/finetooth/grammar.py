"""Selection text to pattern: `path-glob[index]`. A small parser of its own; nothing is evaluated.

text   =  glob [ "[" entry { "," entry } "]" ]
entry  =  "..." | integer | [integer] ":" [integer] [ ":" [integer] ] | "[" integer { "," integer } "]"
glob   =  segments joined by "/"; `*` and `?` match inside one segment, a `**` segment matches any number of them
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_LENGTH = 4096
_TOKEN = re.compile(r"\s*(?:(?P<int>-?\d+)|(?P<dots>\.\.\.)|(?P<sign>[\[\],:]))")


class GrammarError(Exception):
    """Text that is not selection text; `str()` points at the column."""

    def __init__(self, text: str, column: int, problem: str):
        shown = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
        super().__init__(f"{problem} at column {column + 1}:\n  {shown}\n  {' ' * column}^")


@dataclass(frozen=True)
class Pattern:
    """A path glob, and the index that follows it (None where there is none)."""

    glob: str
    index: tuple[Any, ...] | None

    def matches(self, path: str) -> bool:
        """Whether the glob covers the whole path."""
        return _segments_match(self.glob.split("/"), path.split("/"))


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Pattern:
    """The pattern a selection text describes.

    >>> parse("**/ffn_*/kernel[:, :64]").matches("encoder/block_1/ffn_2/kernel")
    True
    >>> parse("head/bias[[1,5,-1]]").index
    ((1, 5, -1),)
    """
    if len(text) > MAX_LENGTH:
        raise GrammarError(text[:40] + "...", 0, f"Selection text is limited to {MAX_LENGTH} characters")
    glob, bracket, _ = text.partition("[")
    stripped = glob.strip()
    if not stripped:
        raise GrammarError(text, 0, "Expected a path")
    for match in re.finditer(r"[\s\]\\{}()!]|//", glob.rstrip()):
        if match.start() >= len(glob) - len(glob.lstrip()):
            raise GrammarError(text, match.start(), f"Unexpected {match.group()!r} in a path")
    return Pattern(stripped, _Index(text, len(glob)).read() if bracket else None)


def _segments_match(pattern: Sequence[str], segments: Sequence[str]) -> bool:
    return _wildcard(pattern, segments, "**", lambda glob, name: _wildcard(glob, name, "*", _character_matches))


def _character_matches(wanted: str, found: str) -> bool:
    return wanted in ("?", found)


def _wildcard(pattern: Sequence[str], items: Sequence[str], star: str, same: Callable[[str, str], bool]) -> bool:
    """Wildcard match without backtracking into earlier stars, so that no text can make it slow."""
    at = position = 0
    resume: tuple[int, int] | None = None
    while position < len(items):
        if at < len(pattern) and pattern[at] == star:
            resume = (at, position)
            at += 1
        elif at < len(pattern) and same(pattern[at], items[position]):
            at, position = at + 1, position + 1
        elif resume:
            at, position = resume[0] + 1, resume[1] + 1
            resume = (resume[0], position)
        else:
            return False
    return all(item == star for item in pattern[at:])


class _Index:
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
        raise GrammarError(self.text, self.column, problem)

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
