"""Every Python example in the README and the documentation runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(match.group(1), id=f"{page.name}-{number}")
    for page in PAGES
    for number, match in enumerate(re.finditer(r"```python\n(.*?)```", page.read_text(), re.S), 1)
]


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("source", EXAMPLES)
def test_the_example_runs(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "example"}
    exec(compile(source, "example", "exec"), names)
    assert len(names) > 2  # it ran to its end and left its results behind
