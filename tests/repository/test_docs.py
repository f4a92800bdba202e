"""Every Python example in the README and the documentation runs, and prints what is written next to it."""

import re
from pathlib import Path

import keras
import pytest

# `make test` runs them on the quickest backend, `make test-all` on all.
pytestmark = [pytest.mark.long] if keras.backend.backend() != "torch" else []

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
def test_the_example_runs(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "example"}
    exec(compile(source, "example", "exec"), names)
    assert len(names) > 2  # it ran to its end and left its results behind
    promised = re.findall(r"^print\(.*\)  # (.*)$", source, re.M)
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line in promised] == promised


def test_some_examples_say_what_they_print():
    assert sum(len(re.findall(r"^print\(.*\)  # ", source.values[0], re.M)) for source in EXAMPLES) >= 2
