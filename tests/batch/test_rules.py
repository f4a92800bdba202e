"""Choosing examples: how many, which, the same on every backend, and what sampling owes to arithmetic."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

import finetooth as ft

numbers = st.floats(-10, 10, width=32, allow_subnormal=False)
scores = st.sampled_from([1, 2, 9]).flatmap(lambda n: st.lists(numbers, min_size=n, max_size=n))


def indices(found) -> list[int]:
    return [int(i) for i in ops.convert_to_numpy(found)]


@settings(max_examples=30, deadline=None)
@given(scores=scores, data=st.data())
def test_rules_keep_what_a_stable_sort_keeps(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    falling = np.argsort(-np.array(scores, "float32"), kind="stable").tolist()
    rising = np.argsort(np.array(scores, "float32"), kind="stable").tolist()
    assert indices(ft.batch.hardest(scores, k)) == falling[:k]
    assert indices(ft.batch.easiest(scores, k)) == rising[:k]
    skip = data.draw(st.sampled_from([0.0, 0.25, 0.5]))
    start = min(int(len(scores) * skip), len(scores) - k)
    assert indices(ft.batch.middle(scores, k, skip)) == falling[start : start + k]
    assert len(set(indices(ft.batch.random(scores, k, seed=3)))) == k


def test_equal_scores_give_exactly_k_the_earliest():
    assert indices(ft.batch.hardest(np.ones(9), 4)) == [0, 1, 2, 3]


@settings(max_examples=25, deadline=None)
@given(labels=st.lists(st.integers(0, 3), min_size=8, max_size=8), data=st.data())
def test_balanced_takes_labels_in_turn(labels, data):
    k = data.draw(st.integers(1, len(labels)))
    rng = np.random.default_rng(len(labels))
    scores = rng.normal(size=len(labels)).astype("float32")
    kept = indices(ft.batch.balanced(scores, k, labels))
    counts = {label: sum(labels[i] == label for i in kept) for label in set(labels)}
    fewest = min(counts[label] for label in counts if counts[label] < labels.count(label)) if k < len(labels) else 0
    assert len(set(kept)) == k and (k == len(labels) or max(counts.values()) <= fewest + 1)
    for label in counts:  # within a label the hardest
        own = [i for i in np.argsort(-scores) if labels[i] == label]
        assert {i for i in kept if labels[i] == label} == set(own[: counts[label]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_never_kept_and_finite_ones_are_repeated(bad):
    scores = [bad, 1.0, bad, 3.0, 2.0]
    assert indices(ft.batch.hardest(scores, 2)) == [3, 4]
    assert indices(ft.batch.hardest(scores, 5)) == [3, 4, 1, 3, 4]
    assert indices(ft.batch.easiest(scores, 4)) == [1, 4, 3, 1]
    assert indices(ft.batch.middle(scores, 2, skip=0.5)) == [4, 1]
    assert set(indices(ft.batch.random(scores, 3, seed=1))) == {1, 3, 4}
    kept = ft.batch.percentile(scores, 3, np.arange(4.0), seed=1)
    assert set(indices(kept)) == {1, 3, 4}


def test_the_same_seed_draws_the_same_and_another_draws_others():
    draws = [indices(ft.batch.random(np.zeros(50), 10, seed=seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    generator = keras.random.SeedGenerator(5)
    first, second = (indices(ft.batch.random(np.zeros(50), 10, seed=generator)) for _ in range(2))
    assert first != second


@settings(max_examples=25, deadline=None)
@given(scores=scores, recent=scores, beta=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_chances_are_the_share_of_recent_losses_that_are_not_above(scores, recent, beta):
    values, history = np.array(scores, "float32"), np.array(recent, "float32")
    share = (history[None] <= values[:, None]).mean(1)
    share = np.maximum(share, 0.5 / len(recent))  # nothing is impossible
    found = ft.batch.chances(values, np.append(history, [np.nan, np.nan]), beta)
    np.testing.assert_allclose(ops.convert_to_numpy(found), share**beta, rtol=1e-5)


def test_without_a_history_all_are_as_likely():
    found = ft.batch.chances([3.0, 1.0], np.full(4, np.nan))
    np.testing.assert_array_equal(ops.convert_to_numpy(found), [1.0, 1.0])


def test_importance_weights_make_the_kept_mean_that_of_the_batch():
    """Averaged over 3000 draws of 3 from 6, with chances that differ by a factor of 12; the error is of five sigma."""
    chances = np.array([0.08, 0.2, 0.3, 0.5, 0.8, 1.0], "float32")
    worth = np.array([9.0, 7.0, 2.0, 0.0, -1.0, -3.0])
    generator = keras.random.SeedGenerator(11)
    draw = compiled(lambda: ft.batch.sample(chances, 3, generator), generator)
    means, plain = [], []
    for _ in range(3000):
        kept, weights = draw()
        means.append((worth[kept] * weights).mean())
        plain.append(worth[kept].mean())
    error = np.std(means) / np.sqrt(len(means))
    assert abs(np.mean(means) - worth.mean()) < 5 * error
    assert abs(np.mean(plain) - worth.mean()) > 10 * error  # without the weights it is another mean


def compiled(draw, generator):
    """The draw as NumPy arrays, compiled on TensorFlow, where it would take its time."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        draw = tf.function(draw)
    return lambda: tuple(ops.convert_to_numpy(value) for value in draw())


def test_all_are_kept_with_weight_one_if_there_are_no_more():
    kept, weights = ft.batch.sample([0.1, 0.9], 2, seed=0)
    assert sorted(indices(kept)) == [0, 1]
    np.testing.assert_array_equal(ops.convert_to_numpy(weights), [1.0, 1.0])


def test_the_history_forgets_the_oldest():
    history = ops.convert_to_numpy(ft.batch.remembered([3.0, 2.0, 1.0], [5.0, 4.0]))
    np.testing.assert_array_equal(history, [5.0, 4.0, 3.0])
    longer = ops.convert_to_numpy(ft.batch.remembered([1.0], [5.0, 4.0]))
    np.testing.assert_array_equal(longer, [5.0])


def test_entropy_and_margin_against_numpy():
    logits = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    p = np.exp(logits.astype("float64")) / np.exp(logits.astype("float64")).sum(-1, keepdims=True)
    best = np.sort(p)[:, ::-1]
    for given_as, from_logits in ((logits, True), (p.astype("float32"), False)):
        entropy, margin = (ops.convert_to_numpy(f(given_as, from_logits)) for f in (ft.batch.entropy, ft.batch.margin))
        np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)
        np.testing.assert_allclose(margin, best[:, 1] - best[:, 0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: ft.batch.hardest([1.0, 2.0], 3), "k=3 for 2 scores"),
        (lambda: ft.batch.hardest([1.0, 2.0], 0), "k=0"),
        (lambda: ft.batch.easiest([[1.0]], 1), r"shape \(1, 1\)"),
        (lambda: ft.batch.middle([1.0], 1, skip=1.0), "skip"),
        (lambda: ft.batch.chances([1.0], [1.0], beta=-1), "beta"),
        (lambda: ft.batch.balanced([1.0, 2.0], 1, [0]), "1 labels were given for 2 scores"),
        (lambda: ft.batch.entropy([0.5, 0.5]), "one row"),
        (lambda: ft.batch.Stale("id", 0, 3), "examples"),
        (lambda: ft.batch.Stale("id", 3, 0.5), "steps"),
    ],
)
def test_bad_input_is_refused(call, text):
    with pytest.raises(ft.BatchError, match=text):
        call()
