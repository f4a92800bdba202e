"""Every Python example in the README and the documentation runs, prints what is shown, and every link leads somewhere.

A snippet that begins with an import starts anew; any other goes on from the one before it on its page. A plain block
that follows a snippet is what the snippet prints.
"""

import re
from pathlib import Path

import keras
import pytest

# `make test` runs them on the quickest backend, `make test-all` on all.
pytestmark = [pytest.mark.long] if keras.backend.backend() != "torch" else []

ROOT = Path(__file__).parents[2]
SNIPPET = re.compile(r"```python\n(?P<source>.*?)```\n(?:\n```\n(?P<output>.*?)```\n)?", re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = (".github", "benchmarks", "docs", "examples", "src", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def stories(page):
    """The snippets of a page, in lists of those that go on from one another."""
    found: list[list[re.Match]] = []
    for match in SNIPPET.finditer(page.read_text()):
        if not found or match["source"].startswith("import "):
            found.append([])
        found[-1].append(match)
    return found


def anchors(page):
    """The anchors of a page's headings, as they are made where Markdown is shown."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


EXAMPLES = [
    pytest.param(story, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, story in enumerate(stories(page), 1)
]


@pytest.mark.parametrize("story", EXAMPLES)
def test_the_example_runs(story, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "example"}
    for match in story:
        exec(compile(match["source"], "example", "exec"), names)
        shown = [line.rstrip() for line in capsys.readouterr().out.strip("\n").split("\n")]
        if match["output"] is not None:
            assert shown == match["output"].strip("\n").split("\n")
    assert len(names) > 2  # it ran to its end and left its results behind


def test_some_examples_say_what_they_print():
    assert sum(match["output"] is not None for story in EXAMPLES for match in story.values[0]) >= 10


@pytest.mark.numpy
@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.numpy
def test_every_page_is_reached_from_the_index():
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text())}
    assert {*(ROOT / "docs").rglob("*.md")} - {index} <= linked


@pytest.mark.numpy
@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_exist(page):
    homes = [ROOT, ROOT / "src" / "finetooth", page.parent]
    for path in re.findall(r"`([a-z0-9_/]+\.py)`", page.read_text()):
        assert "/" not in path or any((home / path).exists() for home in homes), path
