"""Docstrings and pages are plain: turns of phrase that make a reader stop are counted, and the counts only fall."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.numpy

ROOT = Path(__file__).parents[2]
TURNS = ("what is", "those that", "somebody", "nobody", "of its own", "so many", "while open,")
OPENINGS = ("What", "Whether", "Where", "How", "Which")  # a first line says what a function does, not what it answers

# At most this many are left in the docstrings of src. Whoever mends some lowers the number.
LEFT = {
    "what is": 23,
    "those that": 9,
    "somebody": 4,
    "nobody": 2,
    "of its own": 12,
    "so many": 2,
    "while open,": 10,
    "What": 35,
    "Whether": 23,
    "Where": 7,
    "How": 12,
    "Which": 6,
}
PAGES = sorted(
    [*ROOT.glob("*.md"), *(p for f in ("docs", "examples", "tests", "benchmarks") for p in (ROOT / f).rglob("*.md"))]
)


def turns(text):
    """How often each turn of phrase occurs in a text, in any case and across line breaks."""
    plain = " ".join(text.split()).lower()
    return Counter({turn: len(re.findall(rf"\b{turn}(?!\w)", plain)) for turn in TURNS})


def docstrings():
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def counted():
    """The number of each turn and opening in the docstrings, and where each is."""
    count, places = Counter(), {}
    for place, text in docstrings():
        found = +turns(text)
        found.update([word for word in OPENINGS if re.match(rf"{word}\b", text)])
        count.update(found)
        for word in found:
            places.setdefault(word, []).append(place)
    return count, places


def test_turns_are_found_across_lines_and_within_words_not():
    found = turns("What\nis left of its own. Whatnobody; SOMEBODY.\n    While open, it shows those\n    that trained.")
    assert +found == {"what is": 1, "of its own": 1, "somebody": 1, "while open,": 1, "those that": 1}


@pytest.mark.parametrize("word", [*TURNS, *OPENINGS])
def test_docstrings_get_plainer(word):
    count, places = counted()
    assert count[word] <= LEFT[word], f"{word!r} may occur {LEFT[word]} times and does so in {places[word]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_plain(page):
    assert not +turns(re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
