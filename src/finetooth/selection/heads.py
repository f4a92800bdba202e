"""`heads`: which elements of an attention layer belong to which head, told by names and shapes, not by class."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from ..errors import SelectionError
from ..keras_internals import private as keras_private
from ..keras_internals.weights import selectable
from ..regions.indexing import region_at
from .select import chosen_at, weight_of
from .selection import Selection

# Words in the names of projections. One whose name has words of several kinds, as "query_key_value", is of the first.
OUTPUT = {"output", "out", "o", "wo"}
QUERY = {"query", "q", "wq", "gate", "qkv"}
SHARED = {"key", "k", "wk", "value", "v", "wv", "kv"}
STOCK = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


@dataclass(frozen=True)
class HeadAxis:
    """Where the heads are in a weight: along this axis, each `width` entries wide.

    `grouped`: the axis counts key/value heads, which several query heads may share.
    """

    axis: int
    grouped: bool = False
    width: int = 1


@dataclass(frozen=True, eq=False)
class _Projection:
    """A projection to or from heads: its kernel, with a label for each axis; `inside` are those that may be heads'."""

    path: str
    shape: tuple[int, ...]
    labels: str
    inside: str
    is_output: bool
    grouped: bool
    fused: int  # how many projections it is in one
    bias: str | None
    bias_labels: str

    def axes_of(self, count: int) -> list[str]:
        """The axes between heads and their entries that are so long."""
        return [label for label in self.inside if self.shape[self.labels.index(label)] == count]

    @property
    def width(self) -> int:
        """How many entries a head has, if its axis is the first."""
        return math.prod(self.shape[self.labels.index(label)] for label in self.inside[1:]) // self.fused


def heads(layer: keras.Layer, which: int | Sequence[int]) -> Selection:
    """Select attention heads of a layer.

    A head is its slices of the query, key, value and gate projections (kernel and bias) and its rows of the output
    kernel. The output bias is common to all heads and not selected. Where several query heads share one key/value head,
    as in a `GroupQueryAttention`, it is selected only when all the query heads that read it are, so that no other head
    changes.

    The layer may be of any class: it has `num_heads`, or `num_query_heads` and `num_key_value_heads`, and layers inside
    that are called after what they make (`query`, `key_dense`, `q_proj`, `query_key_value`, `attention_output`), with
    an axis as long as the number of heads. Where names and shapes do not tell, an error lists the weights.

    >>> import keras, finetooth as ft
    >>> layer = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8, name="mha")
    >>> _ = layer(keras.Input((5, 16)), keras.Input((5, 16)))
    >>> part = ft.heads(layer, [0, 3])
    >>> part["mha/query/kernel"].compact_shape, part["mha/attention_output/kernel"].compact_shape
    ((16, 2, 8), (2, 8, 16))
    """
    queries, group = head_counts(layer)
    axes = head_axes(layer)
    which = list(which) if isinstance(which, tuple) else which
    chosen = chosen_at((queries,), which, f"Heads of {layer.name!r}").flat()
    if not chosen.size:
        raise SelectionError(f"The selection is empty: {which!r} names none of the {queries} heads of {layer.name!r}.")
    whole_groups = [g for g in range(queries // group) if all(g * group + i in chosen for i in range(group))]
    weights = selectable(layer)
    regions = {}
    for path, place in axes.items():
        entries = [h * place.width + i for h in (whole_groups if place.grouped else chosen) for i in range(place.width)]
        regions[path] = region_at(weights[path].shape, (slice(None),) * place.axis + (entries, ...))
    return Selection(regions, {path: weight_of(variable) for path, variable in weights.items()})


def head_counts(layer: keras.Layer) -> tuple[int, int]:
    """How many query heads an attention layer has, and how many of them share a key/value head."""
    queries = _number(layer, "num_query_heads", "num_heads")
    if queries is None:
        raise SelectionError(
            "Heads are those of an attention layer, such as MultiHeadAttention, that has num_heads or num_query_heads; "
            f"received {type(layer).__name__}.{_inner_attention(layer)}"
        )
    shared = _number(layer, "num_key_value_heads") or queries
    if queries % shared:
        raise SelectionError(f"{layer.name!r} has {queries} query heads for {shared} key/value heads, no multiple.")
    return queries, queries // shared


def head_axes(layer: keras.Layer) -> dict[str, HeadAxis]:
    """Where the heads are in each weight of an attention layer that has some, by path, in the layer's order."""
    queries, group = head_counts(layer)
    made = list(_projections(layer))
    options = {p: p.axes_of(queries // group if p.grouped else queries) for p in made}
    chosen = {p: label for p in made if (label := _chosen(layer, p, options)) is not None}
    places = {}
    for projection, label in chosen.items():
        places[projection.path] = HeadAxis(projection.labels.index(label), projection.grouped)
        if projection.bias and label in projection.bias_labels:
            places[projection.bias] = HeadAxis(projection.bias_labels.index(label), projection.grouped)
    widths = {p.width for p, label in chosen.items() if not p.is_output and label == p.inside[0]}
    for projection in made:
        if projection.is_output and not options[projection]:
            places |= _side_by_side(projection, queries, widths)
    kinds = {(p.is_output, p.grouped) for p in made if p.path in places}
    if not all(p.path in places for p in made) or not {(True, False), (False, False)} <= kinds:
        raise _untold(layer, queries, queries // group)
    return {path: places[path] for path in selectable(layer) if path in places}


def _projections(layer: keras.Layer) -> Iterator[_Projection]:
    """The projections to and from heads among the layers directly inside, by the words in their names."""
    paths = {id(variable): path for path, variable in selectable(layer).items()}
    for inner in keras_private.inner_layers(layer):
        words = set(re.findall("[a-z]+", inner.name.lower()))
        own = {v.name: v for v in keras_private.own_variables(inner) if id(v) in paths}
        if "kernel" not in own or "norm" in words or not words & (QUERY | SHARED | OUTPUT):
            continue
        shape = tuple(own["kernel"].shape)
        is_output = bool(words & OUTPUT)
        labels, to_output, to_input, bias_labels = _labels(inner, len(shape))
        bias = None if is_output else own.get("bias")
        if bias is not None:
            bias_labels = bias_labels[-len(bias.shape) :]
        yield _Projection(
            path=paths[id(own["kernel"])],
            shape=shape,
            labels=labels,
            inside=to_input if is_output else to_output,
            is_output=is_output,
            grouped=not is_output and not words & QUERY,
            fused=3 if "qkv" in words or {"query", "key", "value"} <= words else 1,
            bias=None if bias is None else paths[id(bias)],
            bias_labels=bias_labels,
        )


def _labels(layer: Any, rank: int) -> tuple[str, str, str, str]:
    """Labels for the axes of a kernel, for those of them in the output and in the input, and for the axes of a bias."""
    if isinstance(layer, keras.layers.EinsumDense):
        x, w, y = layer.equation.replace("->", ",").replace(" ", "").split(",")
        bias = y[min(map(y.index, layer.bias_axes)) :] if layer.bias_axes else ""
        return w, "".join(a for a in w if a in y and a not in x), "".join(a for a in w if a in x and a not in y), bias
    labels = "abcdefghijklmnop"[:rank]
    if isinstance(layer, keras.layers.Dense):
        return labels, labels[1:], labels[:1], labels[1:]
    return labels, labels, labels, labels  # any axis may be that of heads


def _chosen(layer: keras.Layer, projection: _Projection, options: dict[_Projection, list[str]]) -> str | None:
    """The axis of heads, of those that are as long as there are heads.

    Of several it is the first where Keras' own classes are known to put it first, or the one that is in the same place
    as the only candidate of each other projection.
    """
    labels = options[projection]
    if len(labels) <= 1 or isinstance(layer, STOCK):
        return labels[0] if labels else None
    alone = {p.inside.index(others[0]) for p, others in options.items() if len(others) == 1}
    known = [label for label in labels if {projection.inside.index(label)} == alone]
    return known[0] if known and projection.inside != projection.labels else None


def _side_by_side(output: _Projection, queries: int, widths: set[int]) -> dict[str, HeadAxis]:
    """The heads in an output kernel that takes their entries in one axis, one head after the other.

    That is how an axis of heads followed by one of their entries, as a projection before it makes them, is flattened.
    """
    length = output.shape[output.labels.index(output.inside[0])]
    if len(output.inside) > 1 or length % queries or length // queries not in widths:
        return {}
    return {output.path: HeadAxis(output.labels.index(output.inside), width=length // queries)}


def _number(layer: keras.Layer, *names: str) -> int | None:
    """The first of these attributes that the layer has, also with a leading underscore."""
    found = (getattr(layer, prefix + name, None) for name in names for prefix in ("", "_"))
    return next((int(value) for value in found if isinstance(value, int) and value > 0), None)


def _inner_attention(layer: Any) -> str:
    inner = keras_private.layers_of(layer)[1:] if isinstance(layer, keras.Layer) else []
    names = [each.name for each in inner if _number(each, "num_query_heads", "num_heads") is not None]
    return f" Layers inside of it that have heads: {names[:8]}." if names else ""


def _untold(layer: keras.Layer, queries: int, shared: int) -> SelectionError:
    shapes = "".join(f"\n  {path} {tuple(variable.shape)}" for path, variable in selectable(layer).items())
    shared_heads = "" if shared == queries else f" and {shared} key/value heads"
    return SelectionError(
        f"Names and shapes do not tell the {queries} heads{shared_heads} of {layer.name!r}, a {type(layer).__name__}."
        f"{_inner_attention(layer)} Its weights:{shapes}\n"
        "Select each by an index, such as (layer.query.kernel, np.s_[:, 64:128]) for columns 64 to 127."
    )
