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
from typing import Any

from ..regions.index_text import MAX_LENGTH, TextError, read_index


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
        raise TextError(text[:40] + "...", 0, f"Selection text is limited to {MAX_LENGTH} characters")
    glob, bracket, _ = text.partition("[")
    stripped = glob.strip()
    if not stripped:
        raise TextError(text, 0, "Expected a path")
    for match in re.finditer(r"[\s\]\\{}()!]|//", glob.rstrip()):
        if match.start() >= len(glob) - len(glob.lstrip()):
            raise TextError(text, match.start(), f"Unexpected {match.group()!r} in a path")
    return Pattern(stripped, read_index(text, len(glob)) if bracket else None)


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
