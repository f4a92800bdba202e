"""Regions are sets of elements: every operation agrees with boolean masks and with NumPy's own indexing."""

import copy
import json
import math
import pickle

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from finetooth.errors import FinetoothError, SelectionError
from finetooth.regions.indexing import region_at
from finetooth.regions.region import Grid, Points, Region, Whole, empty, grid, points

pytestmark = pytest.mark.numpy

many = settings(max_examples=150, deadline=None, derandomize=True)

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
HUGE = (262144, 16384)  # 2**32 elements
HUGE_LAST = (262143, 16383)


def axis_entries(n: int) -> st.SearchStrategy:
    """Anything that chooses along an axis of size n: what a NumPy index may hold."""
    return st.one_of(
        st.slices(n),
        st.integers(-n, n - 1),
        st.lists(st.integers(-n, n - 1), max_size=6),
        st.lists(st.booleans(), min_size=n, max_size=n).map(lambda flags: np.array(flags, bool)),
    )


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple:
    """An index of at most one entry per axis, with `...` anywhere or nowhere."""
    given_axes = draw(st.integers(0, len(shape)))
    if given_axes < len(shape) or draw(st.booleans()):
        before = draw(st.integers(0, given_axes))
        after = (
            [draw(axis_entries(n)) for n in shape[len(shape) - (given_axes - before) :]] if given_axes > before else []
        )
        return (*(draw(axis_entries(n)) for n in shape[:before]), Ellipsis, *after)
    return tuple(draw(axis_entries(n)) for n in shape)


@st.composite
def masks(draw: st.DrawFn, shape: tuple[int, ...]) -> np.ndarray:
    bits = draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape)))
    return np.array(bits, bool).reshape(shape)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """A region of each making: everything, nothing, an index, a mask, raw points that nobody normalised, a grid."""
    return draw(
        st.one_of(
            st.just(Whole(shape)),
            st.just(empty(shape)),
            indices(shape).map(lambda index: region_at(shape, index)),
            masks(shape).map(lambda mask: region_at(shape, mask)),
            masks(shape).map(lambda mask: Points(shape, np.flatnonzero(mask))),
            st.tuples(*(st.lists(st.integers(0, n - 1), min_size=1, max_size=n) for n in shape)).map(
                lambda axes: grid(shape, axes)
            ),
        )
    )


@st.composite
def groups(draw: st.DrawFn, count: int) -> tuple[Region, ...]:
    shape = draw(shapes)
    return tuple(draw(regions(shape)) for _ in range(count))


def numpy_choice(shape: tuple[int, ...], index: tuple) -> np.ndarray:
    """The sorted flat indices NumPy itself finds for an index, axis by axis and then through `np.ix_`."""
    where = next((i for i, entry in enumerate(index) if entry is Ellipsis), len(index))
    after = index[where + 1 :]
    entries = [*index[:where], *[slice(None)] * (len(shape) - where - len(after)), *after]
    chosen = []
    for entry, n in zip(entries, shape):
        entry = np.array(entry, int) if isinstance(entry, list) else entry
        chosen.append(np.atleast_1d(np.arange(n)[entry]))
    return np.unique(np.arange(math.prod(shape)).reshape(shape)[np.ix_(*chosen)])


# --- against NumPy ---------------------------------------------------------------------------------------------------


@many
@given(st.data())
def test_an_index_addresses_what_numpy_addresses(data):
    shape = data.draw(shapes)
    index = data.draw(indices(shape))
    np.testing.assert_array_equal(region_at(shape, index).flat(), numpy_choice(shape, index))


@many
@given(st.data())
def test_a_mask_of_the_whole_shape_is_itself(data):
    shape = data.draw(shapes)
    mask = data.draw(masks(shape))
    region = region_at(shape, mask)
    np.testing.assert_array_equal(region.mask(), mask)
    np.testing.assert_array_equal(region.flat(), np.flatnonzero(mask))


@many
@given(groups(1))
def test_flat_is_sorted_int64_and_agrees_with_mask_size_and_compact_shape(group):
    (region,) = group
    flat, mask = region.flat(), region.mask()
    assert flat.dtype == np.int64 and mask.dtype == bool and mask.shape == region.shape
    np.testing.assert_array_equal(flat, np.flatnonzero(mask))
    assert region.size == mask.sum() == math.prod(region.compact_shape)


@many
@given(groups(1))
def test_gather_takes_the_elements_in_flat_order(group):
    (region,) = group
    array = np.arange(math.prod(region.shape), dtype=np.float32).reshape(region.shape)
    gathered = region.gather(array)
    assert gathered.shape == region.compact_shape
    np.testing.assert_array_equal(gathered.reshape(-1), array[region.mask()])


@many
@given(groups(1), st.sampled_from("CF"))
def test_scatter_is_the_inverse_of_gather_for_any_memory_order(group, order):
    (region,) = group
    array = np.asarray(np.arange(math.prod(region.shape), dtype=np.float32).reshape(region.shape), order=order)
    new = -1 - np.arange(region.size, dtype=np.float32).reshape(region.compact_shape)
    before = array.copy()
    merged = region.scatter(array, new)
    np.testing.assert_array_equal(region.gather(merged), new)
    np.testing.assert_array_equal(merged[~region.mask()], array[~region.mask()])
    np.testing.assert_array_equal(region.scatter(merged, region.gather(array)), array)
    np.testing.assert_array_equal(array, before)


def test_gathered_values_are_a_copy():
    array = np.zeros((3, 4), np.float32)
    for region in (Whole((3, 4)), region_at((3, 4), np.s_[1]), Points((3, 4), [0, 5, 7])):
        region.gather(array)[...] = 1
        region.scatter(array, np.ones(region.compact_shape))
        assert not array.any()


def test_an_array_of_another_shape_is_refused():
    for region in (Whole((3, 4)), region_at((3, 4), np.s_[1]), Points((3, 4), [0, 5, 7])):
        with pytest.raises(SelectionError, match=r"\(3, 4\).*\(4, 3\)"):
            region.gather(np.zeros((4, 3)))
        with pytest.raises(SelectionError, match=r"\(3, 4\).*\(12,\)"):
            region.scatter(np.zeros(12), np.zeros(region.compact_shape))


# --- set laws --------------------------------------------------------------------------------------------------------


@many
@given(groups(2))
def test_operators_are_those_of_masks(group):
    a, b = group
    x, y = a.mask(), b.mask()
    for region, mask in ((a | b, x | y), (a & b, x & y), (a - b, x & ~y), (~a, ~x)):
        assert isinstance(region, Region) and region.shape == a.shape
        np.testing.assert_array_equal(region.mask(), mask)
    assert (a <= b) == bool((~x | y).all())
    assert (a == b) == bool((x == y).all())
    assert (a != b) == bool((x != y).any())


@many
@given(groups(3))
def test_set_laws_hold(group):
    a, b, c = group
    everything, nothing = Whole(a.shape), empty(a.shape)
    assert a | b == b | a and a & b == b & a
    assert (a | b) | c == a | (b | c) and (a & b) & c == a & (b & c)
    assert a & (b | c) == (a & b) | (a & c) and a | (b & c) == (a | b) & (a | c)
    assert a | (a & b) == a == a & (a | b)
    assert ~(a | b) == ~a & ~b and ~(a & b) == ~a | ~b
    assert ~~a == a and a | ~a == everything and a & ~a == nothing
    assert a - b == a & ~b and (a - b) & b == nothing and (a - b) | (a & b) == a
    assert a | nothing == a == a & everything and a | everything == everything and a & nothing == nothing
    assert nothing <= a & b <= a <= a | b <= everything
    assert (a <= b and b <= a) == (a == b)
    assert (a | b).size == a.size + b.size - (a & b).size


@many
@given(groups(1))
def test_equal_sets_are_equal_and_hash_alike_whatever_their_shape(group):
    (region,) = group
    twins = [
        Points(region.shape, region.flat()),
        points(region.shape, region.flat()),
        region_at(region.shape, region.mask()),
    ]
    assert all(twin == region and region == twin and hash(twin) == hash(region) for twin in twins)
    assert len({region, *twins}) == 1


@many
@given(groups(1))
def test_membership_is_that_of_the_mask(group):
    (region,) = group
    mask = region.mask()
    assert all((index in region) == mask[index] for index in np.ndindex(region.shape))
    assert tuple(region.shape) not in region or not region.shape
    assert (-1,) * len(region.shape) not in region or not region.shape
    assert (0,) * (len(region.shape) + 1) not in region


@many
@given(groups(1))
def test_plain_form_survives_json_and_copies_are_equal(group):
    (region,) = group
    again = Region.from_dict(json.loads(json.dumps(region.to_dict())))
    assert again == region and again.shape == region.shape
    np.testing.assert_array_equal(again.flat(), region.flat())
    for twin in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        assert twin == region and type(twin) is type(region)


def test_regions_of_different_shapes_or_other_things_do_not_combine():
    a = Whole((3, 4))
    for other in (Whole((4, 3)), region_at((3,), 0), 7, None, np.ones((3, 4), bool)):
        for combine in (a.__or__, a.__and__, a.__sub__, a.__le__):
            with pytest.raises(SelectionError):
                combine(other)
    assert a != Whole((4, 3)) and a != "a"


# --- the cheapest shape ----------------------------------------------------------------------------------------------


@many
@given(st.data())
def test_a_mask_that_is_an_outer_product_becomes_a_grid(data):
    shape = data.draw(shapes)
    index = data.draw(indices(shape))
    mask = np.zeros(math.prod(shape), bool)
    mask[numpy_choice(shape, index)] = True
    region = region_at(shape, mask.reshape(shape))
    assert isinstance(region, Whole if mask.all() else Grid if mask.any() else Points)


@many
@given(st.data())
def test_a_mask_that_is_no_outer_product_becomes_points(data):
    shape = data.draw(shapes)
    mask = data.draw(masks(shape))
    sides = [len(np.unique(coordinate)) for coordinate in (np.nonzero(mask) if shape else ())]
    region = region_at(shape, mask)
    assert isinstance(region, Points) == (not mask.any() or math.prod(sides) != mask.sum())


def test_everything_becomes_whole():
    shape = (3, 4)
    for region in (
        region_at(shape, np.s_[...]),
        region_at(shape, ()),
        region_at(shape, np.s_[:, ::-1]),
        region_at(shape, np.ones(shape, bool)),
        region_at(shape, [0, 1, 2]),
        grid(shape, [range(3), [3, 2, 1, 0]]),
        points(shape, range(12)),
        region_at(shape, np.s_[:2]) | region_at(shape, np.s_[2]),
        ~empty(shape),
    ):
        assert type(region) is Whole


def test_evenly_spaced_indices_become_a_range():
    assert region_at((10,), [1, 4, 7]).axes == (range(1, 8, 3),)
    assert region_at((10,), [7, 4, 4, 1, -3]).axes == (range(1, 8, 3),)
    assert region_at((10,), [5]).axes == (range(5, 6),)
    assert region_at((10,), np.s_[8:2:-3]).axes == (range(5, 9, 3),)
    assert Grid((10,), [range(8, 2, -3)]).axes == (range(5, 9, 3),)
    assert isinstance(region_at((10,), [0, 1, 3]).axes[0], np.ndarray)


def test_neighbouring_blocks_join_into_a_grid():
    left, right = region_at((8, 6), np.s_[:, :2]), region_at((8, 6), np.s_[:, 2:4])
    assert type(left | right) is Grid and (left | right).compact_shape == (8, 4)
    assert type((left | right) - left) is Grid and (left | right) - left == right
    assert type(~left) is Grid


def test_a_scalar_is_whole_or_nothing():
    assert type(region_at((), ())) is type(region_at((), ...)) is type(region_at((), np.array(True))) is Whole
    assert region_at((), np.array(False)) == empty(()) == ~Whole(())
    assert Whole(()).size == 1 and Whole(()).compact_shape == () and () in Whole(()) and () not in empty(())
    assert Whole(()).scatter(np.array(1.0), np.array(2.0)) == 2.0


def test_a_tensor_without_elements_has_one_region():
    nothing = Whole((0, 3))
    assert nothing == empty((0, 3)) == region_at((0, 3), np.s_[:, 1]) == ~nothing == nothing | nothing
    assert nothing.size == 0 and (0, 0) not in nothing and nothing.gather(np.zeros((0, 3))).shape == (0, 3)


def test_regions_cannot_be_changed_through_their_arrays():
    listed = [0, 1, 3]
    grid, some = region_at((6,), listed), Points((6,), np.array(listed))
    listed[0] = 5
    assert grid.flat().tolist() == some.flat().tolist() == [0, 1, 3]
    for array in (grid.axes[0], some.flat()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2


# --- beyond 2**31 elements: arithmetic only, nothing of that size is allocated ---------------------------------------


@pytest.mark.parametrize("shape", [HUGE, (2**20, 2**11, 2**10), (2**40,)])
def test_the_last_element_of_a_huge_tensor_round_trips(shape):
    last = tuple(n - 1 for n in shape)
    total = math.prod(shape)
    assert total > 2**31
    for region in (
        region_at(shape, last),
        region_at(shape, (-1,) * len(shape)),
        Points(shape, [total - 1]),
        points(shape, [total - 1]),
    ):
        assert region.flat().tolist() == [total - 1] and region.flat().dtype == np.int64
        assert last in region and (0,) * len(shape) not in region
        assert region.size == 1
        assert Region.from_dict(json.loads(json.dumps(region.to_dict()))) == region
    assert [int(c[0]) for c in Points(shape, [total - 1]).coordinates()] == list(last)


def test_rows_and_columns_of_a_huge_tensor_combine_exactly():
    rows, columns = region_at(HUGE, np.s_[-2:]), region_at(HUGE, np.s_[:, [0, 7, 16383]])
    both = rows | columns
    assert both.size == 2 * 16384 + 3 * 262144 - 6
    assert HUGE_LAST in both and (0, 7) in both and (262141, 16382) not in both and (0, 1) not in both
    assert rows & columns == Grid(HUGE, [[262142, 262143], [0, 7, 16383]])
    assert (both - rows).size == 3 * 262142 and both - columns == rows - columns
    assert rows <= both and columns <= both and not both <= rows
    assert both.flat()[-1] == 2**32 - 1 and (np.diff(both.flat()) > 0).all()


def test_grids_of_a_huge_tensor_stay_grids():
    block = region_at(HUGE, np.s_[1000:2000, 100:200])
    assert type(~region_at(HUGE, np.s_[:262000])) is Grid and (~region_at(HUGE, np.s_[:262000])).size == 144 * 16384
    assert (Whole(HUGE) & block) == block and (Whole(HUGE) | block) == Whole(HUGE) and block <= Whole(HUGE)
    assert Whole(HUGE).size == 2**32 and HUGE_LAST in Whole(HUGE)
    assert block | region_at(HUGE, np.s_[2000:3000, 100:200]) == region_at(HUGE, np.s_[1000:3000, 100:200])


def test_points_of_a_huge_tensor_combine_exactly():
    a, b = Points(HUGE, [1, 2**31, 2**32 - 1]), Points(HUGE, [0, 2**31, 2**32 - 2])
    assert (a | b).flat().tolist() == [0, 1, 2**31, 2**32 - 2, 2**32 - 1]
    assert (a & b).flat().tolist() == [2**31] and (a - b).flat().tolist() == [1, 2**32 - 1]
    assert a & region_at(HUGE, np.s_[131072:]) == Points(HUGE, [2**31, 2**32 - 1])


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (np.s_[4], "Index 4 is out of range for axis 0 of size 4"),
        (np.s_[:, -4], "Index -4 is out of range for axis 1 of size 3"),
        (np.s_[:, [0, 3]], "Index 3 is out of range for axis 1 of size 3"),
        (np.uint64(2**64 - 1), "18446744073709551615"),
        (2**70, str(2**70)),
        (np.s_[0, 0, 0], r"3 indices for a tensor of rank 2 and shape \(4, 3\)"),
        (np.s_[..., 0, ...], "at most one"),
        (np.ones((3, 4), bool), r"mask of shape \(3, 4\) does not fit a tensor of shape \(4, 3\)"),
        (np.ones(3, bool), r"Axis 0 has size 4; received a mask of shape \(3,\)"),
        (np.array(True), r"mask of shape \(\)"),
        (np.s_[:, True], r"received a mask of shape \(\)"),
        ([[0, 1], [1, 2]], "expected integers, a slice or a mask"),
        ([[0, 1], [1]], r"\[\[0, 1\], \[1\]\]"),
        (np.s_[:, [[0], [1, 2]]], r"\[\[0\], \[1, 2\]\]"),
        (0.5, "expected integers, a slice or a mask; received 0.5"),
        ("kernel", "received 'kernel'"),
        (None, "received None"),
        (np.s_[::0], "zero"),
        (np.s_["a":], "Axis 0"),
        (np.s_[0.5:], "Axis 0"),
    ],
)
def test_a_bad_index_is_one_clear_error(index, said):
    with pytest.raises(SelectionError, match=said) as caught:
        region_at((4, 3), index)
    assert isinstance(caught.value, FinetoothError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grid((4, 3), [range(4)]),
        lambda: Grid((4, 3), [range(5), range(3)]),
        lambda: Grid((4, 3), [[-1], range(3)]),
        lambda: Grid((4, 3), [[0.5], range(3)]),
        lambda: Grid((4, 3), [[True, False], range(3)]),
        lambda: Points((4, 3), [12]),
        lambda: Points((4, 3), [-1]),
        lambda: Points((4, 3), [0.5]),
        lambda: Points((4, 3), np.array([2**64 - 1], np.uint64)),
        lambda: Whole((-1,)),
    ],
)
def test_regions_that_do_not_fit_their_shape_cannot_be_made(make):
    with pytest.raises(SelectionError):
        make()


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        None,
        {"shape": 3},
        {"shape": ["a"]},
        {"shape": [4], "points": [4]},
        {"shape": [4], "points": [0.5]},
        {"shape": [4], "points": ["a"]},
        {"shape": [4], "points": [10**30]},
        {"shape": [4], "axes": [{"range": [0, 4, 0]}]},
        {"shape": [4], "axes": [{"range": "abc"}]},
        {"shape": [4], "axes": [{"range": [0, 9, 1]}]},
        {"shape": [4], "axes": []},
        {"shape": [4], "axes": 1},
        {"shape": [-4]},
    ],
)
def test_a_plain_form_that_is_none_is_refused(data):
    with pytest.raises(SelectionError):
        Region.from_dict(data)


def test_text_says_which_elements_and_stays_short():
    shape = (100, 40)
    assert region_at(shape, np.s_[5, ::2]).text() == "[5, 0:39:2]"
    assert region_at(shape, np.s_[:, 3:9]).text() == "[:, 3:9]"
    assert region_at(shape, np.s_[[1, 2, 5]]).text() == "[[1,2,5], :]"
    assert region_at(shape, [1, 2, 5, 6, 7, 8, 9, 20]).text() == "[[1,2,5,6,7,8,...] (8), :]"
    assert Whole(shape).text() == "[...]"
    assert "1,234" in Points(shape, np.arange(1234)).text()
