"""A Selection is an immutable set of elements of a model."""

import copy
import functools
import io
import json
import pickle

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from keras import layers
from rich.console import Console

import finetooth as ft
from finetooth.regions.indexing import region_at
from finetooth.regions.region import Grid, Points, Whole
from finetooth.selection.selection import WeightSpec

many = settings(max_examples=100, deadline=None, derandomize=True)

SHAPES = {"a/kernel": (3, 4), "a/bias": (4,), "b/kernel": (4, 2, 2), "scale": ()}
WEIGHTS = {path: WeightSpec(shape, "float32") for path, shape in SHAPES.items()}


def small_model(units: int = 3) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(units, name="a"),
            layers.BatchNormalization(name="n"),
            layers.Dense(2, name="b"),
        ]
    )


@st.composite
def selections(draw: st.DrawFn) -> ft.Selection:
    """A random set of elements; each variable left out, whole, or a random mask."""
    regions = {}
    for path, shape in SHAPES.items():
        size = int(np.prod(shape))
        bits = draw(st.none() | st.just([True] * size) | st.lists(st.booleans(), min_size=size, max_size=size))
        if bits is not None:
            regions[path] = region_at(shape, np.array(bits, bool).reshape(shape))
    return ft.Selection(regions, WEIGHTS)


def elements(selection: ft.Selection) -> set[tuple]:
    """The plain set that a selection stands for."""
    return {
        (path, index) for path, shape in SHAPES.items() for index in np.ndindex(shape) if (path, index) in selection
    }


EVERYTHING = {(path, index) for path, shape in SHAPES.items() for index in np.ndindex(shape)}


@many
@given(selections(), selections())
def test_operators_are_those_of_sets(a, b):
    x, y = elements(a), elements(b)
    assert len(a) == a.size == len(x) and bool(a) == bool(x)
    assert elements(a | b) == x | y and elements(a & b) == x & y
    assert elements(a - b) == x - y and elements(~a) == EVERYTHING - x
    assert (a <= b) == (x <= y) and (a == b) == (x == y) and (a != b) == (x != y)
    assert a.fraction == len(x) / len(EVERYTHING)


@many
@given(selections(), selections(), selections())
def test_set_laws_hold(a, b, c):
    nothing = a - a
    assert a | b == b | a and a & b == b & a
    assert (a | b) | c == a | (b | c) and (a & b) & c == a & (b & c)
    assert a & (b | c) == (a & b) | (a & c) and a | (b & c) == (a | b) & (a | c)
    assert ~(a | b) == ~a & ~b and ~~a == a and a & ~a == nothing and a - b == a & ~b
    assert (a | b).size == a.size + b.size - (a & b).size
    assert hash(a | b) == hash(b | a) and hash(~~a) == hash(a) and len({a | b, b | a}) == 1


@many
@given(selections())
def test_plain_form_and_copies_are_equal(selection):
    again = ft.Selection.from_dict(json.loads(json.dumps(selection.to_dict())))
    for twin in (again, copy.deepcopy(selection), pickle.loads(pickle.dumps(selection))):
        assert twin == selection and hash(twin) == hash(selection)
        assert twin.weights == selection.weights and list(twin) == list(selection)
        assert ~twin == ~selection


@many
@given(selections())
def test_iteration_is_by_path_in_the_models_order(selection):
    assert list(selection) == [path for path in SHAPES if any(p == path for p, _ in elements(selection))]
    assert dict(selection.items()) == {path: selection[path] for path in selection}
    assert all(path in selection for path in selection)
    assert all((path in selection) == bool(selection[path].size) for path in SHAPES)


def test_a_selection_of_a_model_knows_its_weights_and_share():
    part = ft.select(small_model(), "a/kernel[:, 0]", "b/bias")
    assert len(part) == 6 and part.total == 12 + 3 + 6 + 6 + 2 and part.fraction == 6 / 29
    assert list(part.weights) == ["a/kernel", "a/bias", "n/gamma", "n/beta", "b/kernel", "b/bias"]
    assert part.weights["a/kernel"].shape == (4, 3) and part.weights["a/kernel"].dtype == "float32"
    assert (~part).size == 29 - 6 and "n/moving_mean" not in ~part
    assert ("a/kernel", (3, 0)) in part and ("a/kernel", (3, 1)) not in part and ("b/bias", 1) in part
    assert ("a/kernel", (9, 0)) not in part and ("nowhere", 0) not in part and "nowhere" not in part


def test_selections_of_models_of_the_same_structure_are_equal():
    assert ft.select(small_model(), "a/*") == ft.select(small_model(), "a/kernel", "a/bias")
    assert ft.select(small_model(), "a/*") != ft.select(small_model(), "a/kernel")
    assert ft.select(small_model(), "a/*") != "a/*"


def test_a_selection_cannot_be_changed():
    part = ft.select(small_model(), "a/kernel[0]")
    before, plain = hash(part), part.to_dict()
    part.weights.clear()
    dict(part.items()).clear()
    part.to_dict()["regions"].clear()
    given_regions = {"a/bias": Whole((4,))}
    made = ft.Selection(given_regions, WEIGHTS)
    given_regions.clear()
    assert hash(part) == before and part.to_dict() == plain and len(made) == 4
    for change in ("__setitem__", "__delitem__", "update", "pop", "add", "clear"):
        assert not hasattr(part, change)
    for name in ("size", "weights", "total", "fraction"):
        with pytest.raises(AttributeError):
            setattr(part, name, 1)


def test_a_selection_does_not_keep_the_model_alive():
    """Only weak references are held: what is compared and kept is plain data."""
    model = small_model()
    part = ft.select(model, "a/kernel")
    assert part.weights["a/kernel"].variable() is model.get_layer("a").kernel
    assert copy.deepcopy(part).weights["a/kernel"].variable() is None


def test_a_region_that_fits_no_weight_is_refused():
    with pytest.raises(ft.SelectionError, match="'c/kernel' is not among the weights"):
        ft.Selection({"c/kernel": Whole((4,))}, WEIGHTS)
    with pytest.raises(ft.SelectionError, match=r"belongs to shape \(5,\); the variable has \(4,\)"):
        ft.Selection({"a/bias": Whole((5,))}, WEIGHTS)
    with pytest.raises(ft.SelectionError, match="'c' is not a weight"):
        ft.Selection({}, WEIGHTS)["c"]


def test_selections_of_different_models_do_not_combine():
    models = [small_model(), small_model(), small_model(5)]
    part, same_paths, other_shapes = (ft.select(model, "a/*") for model in models)
    for other, said in (
        (same_paths, "different models, which both have a variable"),
        (other_shapes, r"different models: 'a/kernel' is .*3.* in one and .*5.* in the other"),
        ("a/*", "received str"),
        (None, "received NoneType"),
        (Whole((4,)), "received Whole"),
    ):
        for combine in (part.__or__, part.__and__, part.__sub__, part.__le__):
            with pytest.raises(ft.SelectionError, match=said) as caught:
                combine(other)
            assert isinstance(caught.value, ValueError) and isinstance(caught.value, ft.FinetoothError)


def test_a_selection_from_its_plain_form_combines_with_one_of_the_model():
    model = small_model()
    part = ft.select(model, "a/*")
    again = ft.Selection.from_dict(part.to_dict())
    assert part | again == part == again | part and (part - again).size == 0


def test_selections_of_layers_of_one_model_combine():
    inputs = keras.Input((5, 8))
    first, second = (layers.MultiHeadAttention(2, 3, name=name) for name in ("first", "second"))
    x = first(inputs, inputs)
    model = keras.Model(inputs, second(x, x))
    both = ft.heads(first, 0) | ft.heads(second, 1)
    assert both.size == ft.heads(first, 0).size + ft.heads(second, 1).size
    assert ft.select(model, both) == ft.select(model, ft.heads(first, 0), ft.heads(second, 1))


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"weights": {}},
        {"weights": {"a": [[3]]}, "regions": {}},
        {"weights": {"a": 3}, "regions": {}},
        {"weights": {"a": [["x"], "float32"]}, "regions": {}},
        {"weights": {"a": [[3], "float32"]}, "regions": {"a": {"shape": [4]}}},
        {"weights": {"a": [[3], "float32"]}, "regions": {"a": {"shape": [3], "points": [3]}}},
        {"weights": {"a": [[3], "float32"]}, "regions": {"a": {"shape": [3], "axes": [{"range": [0, 3, 0]}]}}},
        {"weights": {"a": [[3], "float32"]}, "regions": {"b": {"shape": [3]}}},
        {"weights": {"a": [[3], "float32"]}, "regions": ["a"]},
    ],
)
def test_a_plain_form_that_is_none_is_refused(data):
    with pytest.raises(ft.SelectionError):
        ft.Selection.from_dict(data)


# --- how it looks ----------------------------------------------------------------------------------------------------


def rich_text(item) -> str:
    page = io.StringIO()
    Console(file=page, width=120, color_system=None).print(item)
    return page.getvalue()


def test_the_table_says_what_is_selected():
    part = ft.select(small_model(), "a/kernel[:, 0]", ("b/kernel", np.eye(3, 2, dtype=bool)), "b/bias")
    for text in (str(part), rich_text(part), part._repr_html_()):
        for fact in ("a/kernel", "(4, 3)", "[:, 0]", "33.3%", "2 points", "[...]", "100%", "8 of 29 elements"):
            assert fact in text
        assert "a/bias" not in text
    assert repr(part) == "<Selection of 8 elements in 3 variables>"


def test_names_are_data_in_text_and_html():
    path = "<script>alert(1)</script>[/red]\x1b[31m\u202e&\"'/kernel"
    part = ft.Selection({path: Points((9,), [1, 2, 5])}, {path: WeightSpec((9,), "float32")})
    html = part._repr_html_()
    assert "<script" not in html and "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    for text in (str(part), rich_text(part), html):
        assert "\x1b" not in text and "\u202e" not in text
        assert "[/red]" in text and "\\u001b[31m\\u202e" in text


def test_union_of_many_single_elements_is_exact():
    model = small_model()
    every = [("a/kernel", index) for index in np.ndindex(4, 3)]
    union = functools.reduce(lambda a, b: a | b, (ft.select(model, pair) for pair in every))
    assert union == ft.select(model, "a/kernel") and isinstance(union["a/kernel"], Whole)


def test_a_region_that_holds_everything_is_the_whole_variable():
    weights = {"a": WeightSpec((2, 3), "float32")}
    for region in (Grid((2, 3), [range(2), range(3)]), Points((2, 3), range(6))):
        assert type(ft.Selection({"a": region}, weights)["a"]) is Whole
    assert not ft.Selection({"a": Grid((2, 3), [range(2), range(0)])}, weights)
