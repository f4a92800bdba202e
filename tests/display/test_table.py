"""In a table every cell is data: no name can steer a terminal, a rich console or a web page."""

import builtins
import html as html_module
import io
import unicodedata

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from rich.console import Console

from finetooth.display.format import clean, share, size
from finetooth.display.table import Table

pytestmark = pytest.mark.numpy

BAD = [
    "dense[/red]/kernel",
    "[link=https://example.org]dense[/link]",
    "[bold red]x[/]",
    "a\x1b[31mred\x1b[0m",
    "bell\x07back\x08\r\n\t\x00\x7f\x9b",
    "\u202eevil\u202c\u2066x\u2069\u200f\u200b\ufeff",
    "line\u2028para\u2029",
    "lone\ud800surrogate",
    ":smile: & <b>bold</b> \"quoted\" 'single'",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
]


def table_of(text: str) -> Table:
    return Table(title=text, columns=(text, "n"), rows=[(text, "1")], right=("n",), caption=(text, text))


def rich_text(table: Table, **options) -> str:
    page = io.StringIO()
    Console(file=page, width=160, **options).print(table)
    return page.getvalue()


def harmless(text: str, allowed: str = "\n") -> bool:
    return not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text if c not in allowed)


@pytest.mark.parametrize("text", BAD)
def test_bad_names_come_out_as_plain_characters(text):
    table = table_of(text)
    assert harmless(clean(text), allowed="")
    for page in (str(table), rich_text(table, color_system=None)):
        assert harmless(page)
        assert page.count(clean(text)) == 5
    page = table._repr_html_()
    assert harmless(page) and page.count(html_module.escape(clean(text))) == 5
    assert "<script" not in page and "<img" not in page and "<b>bold" not in page
    page.encode("utf-8")


@pytest.mark.parametrize("text", BAD[:3])
def test_markup_is_no_link_and_no_colour_on_a_terminal(text):
    page = rich_text(table_of(text), color_system="truecolor", force_terminal=True, legacy_windows=False)
    assert "\x1b]8;" not in page and "\x1b[31m" not in page and "\x1b[1;31m" not in page
    assert page.count(text) == 5


def test_ordinary_names_are_left_alone():
    for name in ("encoder/block_1/ffn/kernel#2", "höhe/核/kernel", "a b-c.d:0", "[1, 2]", "\\n"):
        assert clean(name) == name


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=40))
def test_any_text_is_harmless(text):
    assert harmless(clean(text), allowed="")
    table = table_of(text)
    assert harmless(str(table)) and harmless(table._repr_html_())
    cell = table._repr_html_().split('<td style="text-align:left">')[1].split("</td>")[0]
    assert html_module.unescape(cell) == clean(text) or "&" in text
    assert not {"<", ">", '"', "'"} & set(cell)


def test_text_is_a_table_of_rows():
    table = Table("Title", ("name", "count"), [("a", "1"), ("bb", "1,000")], right=("count",), caption=("two rows",))
    lines = [line.strip() for line in str(table).splitlines() if line.strip(" ─━")]
    assert [line.split() for line in lines] == [
        ["Title"],
        ["name", "count"],
        ["a", "1"],
        ["bb", "1,000"],
        ["two", "rows"],
    ]
    assert lines[2].index("1") > lines[3].index("1"), "numbers align right"
    assert '<td style="text-align:right">1,000</td>' in table._repr_html_()


def test_a_long_name_is_folded_and_not_cut():
    name = "/".join(f"block_{i}" for i in range(60))
    lines = str(Table("t", ("name",), [(name,)])).splitlines()
    assert "".join(line.strip() for line in lines if "block" in line) == name


def test_text_comes_out_as_text_in_a_notebook_too(monkeypatch):
    """Rich knows a notebook by the class of `get_ipython()`; its console then writes to the page, not to the file."""
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    assert Console(file=io.StringIO()).is_jupyter
    assert "dense/kernel" in str(Table("t", ("name",), [("dense/kernel",)]))


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 10, "0%"),
        (10, 10, "100%"),
        (1, 3, "33.3%"),
        (1, 10**9, "<0.001%"),
        (10**9 - 1, 10**9, ">99.9%"),
        (1, 1000, "0.1%"),
        (0, 0, "0%"),
    ],
)
def test_a_share_is_never_rounded_to_nothing_or_to_everything(part, whole, text):
    assert share(part, whole) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1.5 * 2**30, "1.5 GiB"), (2**50, "1048576.0 GiB")],
)
def test_bytes_have_units(count, text):
    assert size(count) == text


def test_a_narrow_screen_loses_no_column():
    """Headings may be longer than the numbers below them; they wrap, and every cell is still there."""
    columns = ("way", "weights trained", "optimizer state", "to send", "frozen, but moved")
    table = Table("t", columns, [("finetooth", "4,358", "34.1 KiB", "17.0 KiB", "61,636")], right=columns[1:])
    page = io.StringIO()
    Console(file=page, width=60, color_system=None).print(table)
    printed = " ".join(page.getvalue().split())
    assert all(cell in printed for cell in ("finetooth", "4,358", "34.1", "17.0", "61,636"))
    assert all(word in printed for column in columns for word in column.split())


def test_plain_text_is_as_wide_as_its_contents():
    long = "layer/" * 80
    table = Table(title="T", columns=("variable", "n"), rows=[(long, "1"), ("b", "2")], right=("n",))
    lines = str(table).splitlines()
    assert any(long in line and line.endswith("1") for line in lines)
    assert len(lines) == 6  # title, headings and rows, none of them folded
