"""Rules that keep some examples of a batch: pure functions from scores to indices."""

from __future__ import annotations

from typing import Any, TypeAlias

import keras
from keras import ops

from ..errors import BatchError

Tensor = Any
Seed: TypeAlias = int | keras.random.SeedGenerator


def hardest(scores: Tensor, k: int) -> Tensor:
    """The `k` highest scores, highest first.

    >>> import keras, finetooth as ft
    >>> keras.ops.convert_to_numpy(ft.batch.hardest([0.1, 0.7, 0.3, 0.7], 2)).tolist()
    [1, 3]
    """
    scores = _checked(scores, k)
    return _first(scores, k)


def easiest(scores: Tensor, k: int) -> Tensor:
    """The `k` lowest scores, lowest first: robust where the highest are outliers or wrong labels.

    >>> import keras, finetooth as ft
    >>> keras.ops.convert_to_numpy(ft.batch.easiest([0.1, 0.7, 0.3, 0.7], 2)).tolist()
    [0, 2]
    """
    return _first(-_checked(scores, k), k)


def middle(scores: Tensor, k: int, skip: float = 0.1) -> Tensor:
    """The `k` highest scores below the highest of all: a share of `skip` is left out as outliers, the lowest as learnt.

    Where less than this share is left when `k` are taken, less is left out.

    >>> import keras, finetooth as ft
    >>> keras.ops.convert_to_numpy(ft.batch.middle([9.0, 0.1, 0.7, 0.3], 2, skip=0.25)).tolist()
    [2, 3]
    """
    if not 0 <= skip < 1:
        raise BatchError(f"skip is the share of a batch to leave out, from 0 to less than 1; received {skip!r}.")
    scores = _checked(scores, k)
    finite = _count_finite(scores)
    wanted = ops.cast(ops.floor(ops.cast(finite, "float32") * skip), "int32")
    return _first(scores, k, ops.minimum(wanted, ops.maximum(finite - k, 0)))


def random(scores: Tensor, k: int, seed: Seed) -> Tensor:
    """Any `k` whose score is finite, each as likely as any other."""
    scores = _checked(scores, k)
    drawn = keras.random.uniform(ops.shape(scores), seed=seed)
    return _first(ops.where(ops.isfinite(scores), drawn, float("nan")), k)


def balanced(scores: Tensor, k: int, labels: Tensor) -> Tensor:
    """The highest scores of each label in turn: the highest of every label first, then every second highest, up to `k`.

    >>> import keras, finetooth as ft
    >>> keras.ops.convert_to_numpy(ft.batch.balanced([0.9, 0.8, 0.7, 0.1], 2, labels=[0, 0, 0, 1])).tolist()
    [0, 3]
    """
    scores = _checked(scores, k)
    labels = ops.reshape(ops.convert_to_tensor(labels), (-1,))
    if labels.shape[0] is not None and scores.shape[0] is not None and labels.shape[0] != scores.shape[0]:
        raise BatchError(f"{labels.shape[0]} labels were given for {scores.shape[0]} scores.")
    by_score = _order(scores)  # then "earlier" is harder, and ties are gone
    ordered = ops.take(labels, by_score)
    same = ops.cast(ops.equal(ordered[:, None], ordered[None, :]), "int32")
    turn = ops.sum(ops.tril(same, -1), axis=1)  # how many of the same label come before
    turns = ops.where(ops.isfinite(ops.take(scores, by_score)), ops.cast(turn, "float32"), float("nan"))
    return ops.take(by_score, _first(-turns, k))


def percentile(
    scores: Tensor, k: int, history: Tensor, seed: Seed, beta: float = 1.0, importance: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Sample `k`, the harder the likelier: with chances that are the share of recent losses below, to the power `beta`.

    This is the rule of Selective-Backprop, for a fixed number: `sample(chances(scores, history, beta), k, seed)`. With
    `importance` the weights are returned, too, with which the gradient is on average that of the whole batch.
    """
    kept, weights = sample(chances(_checked(scores, k), history, beta), k, seed)
    return (kept, weights) if importance else kept


def chances(scores: Tensor, history: Tensor, beta: float = 1.0) -> Tensor:
    """The share of the losses in `history` that are not above each score, to the power `beta`. NaN in both is left out.

    >>> import keras, finetooth as ft
    >>> recent = [0.0, 1.0, 2.0, 3.0, float("nan")]
    >>> keras.ops.convert_to_numpy(ft.batch.chances([0.5, 2.5], recent, beta=2)).tolist()
    [0.0625, 0.5625]
    """
    if beta < 0:
        raise BatchError(f"beta is 0 or more: the higher it is, the rarer are easy examples; received {beta!r}.")
    scores, history = _vector(scores), _vector(history)
    known = ops.sum(ops.cast(ops.isfinite(history), "float32"))
    below = ops.sum(ops.cast(history[None, :] <= scores[:, None], "float32"), axis=1)
    # A share of zero would never be drawn, whatever happens to it later, and could have no importance weight.
    share = ops.maximum(below, 0.5) / ops.maximum(known, 0.5)
    found = ops.power(ops.where(known > 0, share, 1.0), beta)
    return ops.where(ops.isfinite(scores), found, float("nan"))


def sample(chances: Tensor, k: int, seed: Seed) -> tuple[Tensor, Tensor]:
    """Draw `k` without replacement, with chances in proportion; returns indices and importance weights.

    The mean over the kept of anything times these weights is, on average over draws, its mean over the whole batch.
    """
    # Keys log(chance) + Gumbel noise, of which the highest k are kept. Given the highest key that is not kept, each
    # kept one had been drawn independently, with the probability that its key is above that one.
    chances = _checked(chances, k)
    drawn = keras.random.uniform(ops.shape(chances), minval=1e-7, maxval=1.0 - 1e-7, seed=seed)
    log_chances = ops.log(ops.maximum(chances, 1e-30))
    keys = ops.where(ops.isfinite(chances), log_chances - ops.log(-ops.log(drawn)), float("nan"))
    kept = _first(keys, k)
    finite = _count_finite(chances)
    order = _order(keys)
    bound = ops.take(keys, ops.take(order, ops.minimum(k, ops.shape(keys)[0] - 1)))
    inclusion = -ops.expm1(-ops.exp(ops.take(log_chances, kept) - bound))
    inclusion = ops.where(finite > k, inclusion, 1.0)
    share = ops.cast(k, "float32") / ops.cast(ops.maximum(finite, k), "float32")
    return kept, share / inclusion


def remembered(history: Tensor, scores: Tensor) -> Tensor:
    """The history with these scores as the latest: as many as before, the oldest forgotten.

    >>> import keras, finetooth as ft
    >>> keras.ops.convert_to_numpy(ft.batch.remembered([3.0, 2.0, 1.0], [4.0])).tolist()
    [4.0, 3.0, 2.0]
    """
    history = _vector(history)
    return ops.concatenate([_vector(scores), history])[: history.shape[0]]


def _vector(values: Tensor) -> Tensor:
    values = ops.convert_to_tensor(values)
    if len(values.shape) != 1:
        raise BatchError(f"Expected one number per example, in a vector; received shape {tuple(values.shape)}.")
    return ops.cast(values, "float32")


def _checked(scores: Tensor, k: Any) -> Tensor:
    scores = _vector(scores)
    if isinstance(k, int) and (k < 1 or (scores.shape[0] is not None and k > scores.shape[0])):
        raise BatchError(f"k is from 1 to the number of examples; received k={k} for {scores.shape[0]} scores.")
    return scores


def _count_finite(scores: Tensor) -> Tensor:
    return ops.sum(ops.cast(ops.isfinite(scores), "int32"))


def _order(scores: Tensor) -> Tensor:
    """Highest first, equal ones as they come, not finite ones last."""
    descending = ops.where(ops.isfinite(scores), -scores, float("inf"))
    return ops.cast(ops.argsort(descending), "int32")


def _first(scores: Tensor, k: Any, skip: Any = 0) -> Tensor:
    """The k highest after those skipped. If that is more than there are finite ones, these once more."""
    places = skip + ops.arange(k, dtype="int32") % ops.maximum(_count_finite(scores) - skip, 1)
    return ops.take(_order(scores), places)
