"""Selection text: what parses, what does not and where, and what a glob covers."""

import re
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from finetooth.selection.patterns import MAX_LENGTH, Pattern, TextError, parse

pytestmark = pytest.mark.numpy

many = settings(max_examples=200, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("text", "glob", "index"),
    [
        ("dense/kernel", "dense/kernel", None),
        ("  dense/kernel  ", "dense/kernel", None),
        ("**", "**", None),
        ("*/bias", "*/bias", None),
        ("block_?/**/kernel", "block_?/**/kernel", None),
        ("dense_1/kernel#2", "dense_1/kernel#2", None),
        ("höhe/kernel-0.x", "höhe/kernel-0.x", None),
        ("a[0]", "a", (0,)),
        ("a[-1]", "a", (-1,)),
        ("a[...]", "a", (Ellipsis,)),
        ("a[:]", "a", (slice(None),)),
        ("a[1:]", "a", (slice(1, None),)),
        ("a[:2]", "a", (slice(None, 2),)),
        ("a[1:2]", "a", (slice(1, 2),)),
        ("a[::3]", "a", (slice(None, None, 3),)),
        ("a[::]", "a", (slice(None),)),
        ("a[9:1:-2]", "a", (slice(9, 1, -2),)),
        ("a[-3:-1]", "a", (slice(-3, -1),)),
        ("a[[5]]", "a", ((5,),)),
        ("a[[1,5,-9]]", "a", ((1, 5, -9),)),
        ("a [ : , [ 0 , 2 ] , ... , 3 : 4 ] ", "a", (slice(None), (0, 2), Ellipsis, slice(3, 4))),
        ("a[999999999999999999]", "a", (999999999999999999,)),
        ("a[-999999999999999999]", "a", (-999999999999999999,)),
    ],
)
def test_valid_text_reads_as_written(text, glob, index):
    assert parse(text) == Pattern(glob, index)


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ("", 1, "Expected a path"),
        ("   ", 1, "Expected a path"),
        ("[0]", 1, "Expected a path"),
        ("a b/kernel", 2, "Unexpected ' ' in a path"),
        ("  a b", 4, "Unexpected ' ' in a path"),
        ("a//b", 2, "Unexpected '//' in a path"),
        ("a]", 2, "Unexpected ']' in a path"),
        ("a\\b", 2, "in a path"),
        ("{a,b}/kernel", 1, "Unexpected '{' in a path"),
        ("(a)", 1, "Unexpected '(' in a path"),
        ("a/!b", 3, "Unexpected '!' in a path"),
        ("a[", 3, "found 'end of text'"),
        ("a[]", 3, "found ']'"),
        ("a[,]", 3, "found ','"),
        ("a[0,]", 5, "found ']'"),
        ("a[0", 4, "Expected ',' or ']', found 'end of text'"),
        ("a[0 1]", 5, "Expected ',' or ']', found '1'"),
        ("a[x]", 3, "Unexpected 'x' in an index"),
        ("a[0, x]", 6, "Unexpected 'x' in an index"),
        ("a[1.5]", 4, "Unexpected '.' in an index"),
        ("a[- 1]", 3, "Unexpected '-' in an index"),
        ("a[+1]", 3, "Unexpected '+' in an index"),
        ("a[1:2:0]", 7, "step cannot be zero"),
        ("a[::-0]", 5, "step cannot be zero"),
        ("a[1:2:3:4]", 8, "Expected ',' or ']', found ':'"),
        ("a[[]]", 4, "Expected an integer, found ']'"),
        ("a[[0:2]]", 5, "Expected ']', found ':'"),
        ("a[[0,]]", 6, "Expected an integer, found ']'"),
        ("a[[[0]]]", 4, "Expected an integer, found '['"),
        ("a[[0]", 6, "found 'end of text'"),
        ("a[[0", 5, "Expected ']', found 'end of text'"),
        ("a[0]]", 5, "Nothing may follow the closing bracket"),
        ("a[0][1]", 5, "Nothing may follow the closing bracket"),
        ("a[0]/b", 5, "Unexpected '/' in an index"),
        ("a[....]", 6, "Unexpected '.' in an index"),
        ("a[0, 1000000000000000000]", 6, "at most 18 digits"),
        ("a[-1000000000000000000]", 3, "at most 18 digits"),
        ("a[__import__('os')]", 3, "Unexpected '_' in an index"),
    ],
)
def test_bad_text_points_at_the_column(text, column, said):
    with pytest.raises(TextError) as caught:
        parse(text)
    problem, shown, caret = str(caught.value).split("\n")
    assert said in problem and problem.endswith(f"at column {column}:")
    assert shown == f"  {text}" and caret == " " * (2 + column - 1) + "^"


def test_control_characters_keep_their_column_and_do_not_reach_the_terminal():
    with pytest.raises(TextError) as caught:
        parse("a\x1b[31m\n\t\u202e[0]")
    message = str(caught.value)
    assert not {"\x1b", "\t", "\u202e"} & set(message) and message.count("\n") == 2
    _, shown, caret = message.split("\n")
    assert len(shown) == 2 + len("a\x1b[31m\n\t\u202e[0]") and caret.index("^") == shown.index("m")


def test_overlong_text_is_refused_without_repeating_it():
    assert parse("a" * MAX_LENGTH).glob == "a" * MAX_LENGTH
    with pytest.raises(TextError, match=str(MAX_LENGTH)) as caught:
        parse("a" * (MAX_LENGTH + 1))
    assert len(str(caught.value)) < 200


INDEX_LIKE = st.text("[]:,.-0123456789 ", max_size=60)


@many
@given(st.one_of(st.text(max_size=1024), INDEX_LIKE, INDEX_LIKE.map(lambda index: f"a/b[{index}]")))
def test_any_text_parses_or_is_a_grammar_error(text):
    try:
        pattern = parse(text)
    except TextError as error:
        column = int(re.search(r"at column (\d+):", str(error)).group(1))
        assert 1 <= column <= len(text) + 1
    else:
        assert pattern.glob == text.partition("[")[0].strip()
        assert all(isinstance(entry, int | slice | tuple) or entry is Ellipsis for entry in pattern.index or ())
        pattern.matches("dense/kernel")


def texts_of(entry) -> str:
    if entry is Ellipsis:
        return "..."
    if isinstance(entry, slice):
        return ":".join("" if number is None else str(number) for number in (entry.start, entry.stop, entry.step))
    return "[" + ",".join(map(str, entry)) + "]" if isinstance(entry, tuple) else str(entry)


NUMBERS = st.integers(-(10**6), 10**6)
MAYBE = st.none() | NUMBERS
ENTRIES = st.one_of(
    NUMBERS,
    st.just(Ellipsis),
    st.builds(slice, MAYBE, MAYBE, MAYBE.filter(lambda step: step != 0)),
    st.lists(NUMBERS, min_size=1, max_size=5).map(tuple),
)


@many
@given(st.lists(ENTRIES, min_size=1, max_size=5).map(tuple), st.sampled_from([",", ", ", " , "]))
def test_every_index_that_can_be_written_reads_back(index, comma):
    assert parse(f"x/y[{comma.join(map(texts_of, index))}]").index == index


@pytest.mark.parametrize(
    ("glob", "covered", "not_covered"),
    [
        ("a/b", ["a/b"], ["a", "a/b/c", "x/a/b", "A/b"]),
        ("*", ["a", "kernel"], ["a/b"]),
        ("*/b", ["a/b", "/b"], ["b", "x/a/b"]),
        ("a*", ["a", "ab"], ["a/b", "ba"]),
        ("*a*", ["a", "bab"], ["bb", "a/a"]),
        ("a?c", ["abc"], ["ac", "abbc", "a/c"]),
        ("?", ["x"], ["", "xy"]),
        ("**", ["a", "a/b/c"], []),
        ("**/b", ["b", "a/b", "x/y/b"], ["b/a", "ab"]),
        ("a/**", ["a", "a/b", "a/b/c"], ["ab", "x/a"]),
        ("a/**/z", ["a/z", "a/b/z", "a/b/c/z"], ["az", "a/z/b"]),
        ("**/b/**", ["b", "a/b", "b/c", "a/b/c"], ["ab/c"]),
        ("**/**/b", ["b", "a/b", "a/b/b"], ["a"]),
        ("a**b", ["ab", "axb"], ["a/b"]),
        ("a.c", ["a.c"], ["abc"]),
    ],
)
def test_a_glob_covers_whole_paths(glob, covered, not_covered):
    assert [path for path in covered if not parse(glob).matches(path)] == []
    assert [path for path in not_covered if parse(glob).matches(path)] == []


def reference_segments(pattern: list[str], segments: list[str]) -> bool:
    """The definition, by recursion: `**` is zero or more segments, anything else is one."""
    if not pattern:
        return not segments
    if pattern[0] == "**":
        return any(reference_segments(pattern[1:], segments[i:]) for i in range(len(segments) + 1))
    return bool(segments) and reference_name(pattern[0], segments[0]) and reference_segments(pattern[1:], segments[1:])


def reference_name(pattern: str, name: str) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "*":
        return any(reference_name(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return bool(name) and pattern[0] in ("?", name[0]) and reference_name(pattern[1:], name[1:])


@settings(many, max_examples=600)
@given(
    st.lists(st.one_of(st.just("**"), st.text("ab*?", min_size=1, max_size=4)), min_size=1, max_size=5),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=5),
)
def test_matching_is_what_the_recursive_definition_says(pattern, segments):
    assert parse("/".join(pattern)).matches("/".join(segments)) == reference_segments(pattern, segments)


@many
@given(st.data(), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=5))
def test_replacing_parts_of_a_path_by_wildcards_keeps_it_covered(data, segments):
    pattern = []
    for segment in segments:
        cut = data.draw(st.integers(0, len(segment)))
        pattern.append(data.draw(st.sampled_from(["**", "*", "?" * len(segment), segment[:cut] + "*", segment])))
    assert parse("/".join(pattern)).matches("/".join(segments))


def test_wildcard_heavy_text_does_not_blow_up():
    stars = "*a" * 2000
    assert not parse(stars + "b").matches("a" * 4000)
    assert parse(stars + "*").matches("a" * 4000)
    deep = "/".join(["**", "a"] * 600)
    assert not parse(deep + "/b").matches("/".join("a" * 2000))
    assert parse(deep).matches("/".join("a" * 2000))
    assert not parse("/".join(["**/*a*a*a*b"] * 200)).matches("/".join(["a" * 20] * 400))


def test_deep_nesting_does_not_recurse():
    assert sys.getrecursionlimit() < MAX_LENGTH
    with pytest.raises(TextError, match="at column 4:"):
        parse("a" + "[" * (MAX_LENGTH - 1))
