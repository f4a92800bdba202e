"""Dense and EinsumDense with a grid of their kernel selected: the backward computes the grid's gradient, and no more.

Both layers are one einsum of input and kernel, `y = einsum("bc,cd->bd", x, W)`. The gradient of W is the einsum of x
and dy; restricted to rows R and columns C of W it is the same einsum of x[:, R] and dy[:, C]. So is every other einsum
whose kernel axes each belong to the input or to the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras

from ..backends import backend
from ..part import Part
from ..region import Grid
from . import compose

NAME = "slice"


@dataclass(frozen=True, eq=False)
class Contraction:
    """An einsum of input and kernel for a fixed rank of the input, and what its backward needs of a grid."""

    x: str
    w: str
    y: str
    part: Part
    matmul: bool

    def forward(self, x: Any, kernel: Any) -> Any:
        if self.matmul:
            return backend.matmul(x, kernel)
        return backend.einsum(f"{self.x},{self.w}->{self.y}", x, kernel)

    def keep(self, x: Any) -> Any:
        """What must be kept of the input for the part's gradient."""
        return self._restricted(self.x, x)

    def gradient_x(self, dy: Any, kernel: Any) -> Any:
        if self.matmul:
            return backend.matmul(dy, kernel, transpose_b=True)
        return backend.einsum(f"{self.y},{self.w}->{self.x}", dy, kernel)

    def gradient_part(self, kept: Any, dy: Any) -> Any:
        dy = self._restricted(self.y, dy)
        if self.matmul:
            return backend.matmul(backend.as_matrix(kept), backend.as_matrix(dy), transpose_a=True)
        return backend.einsum(f"{self.x},{self.y}->{self.w}", kept, dy)

    def _restricted(self, labels: str, value: Any) -> Any:
        for axis, where in self.part.place.axes:
            if self.w[axis] in labels:
                value = backend.take(value, labels.index(self.w[axis]), where)
        return value


def fits(layer: keras.Layer, part: Part) -> bool:
    """Whether the layer reads the part's base in the way this rule knows. Subclasses may do otherwise."""
    return (
        type(layer) in (keras.layers.Dense, keras.layers.EinsumDense)
        and isinstance(part.region, Grid)
        and not layer.lora_enabled
        and layer.quantization_mode is None
        and layer.kernel is part.base
        and _contraction(layer, part, len(part.region.shape) + 1) is not None
    )


def call(layer: keras.Layer, part: Part, inputs: Any) -> Any:
    """The layer's call, with the kernel read as base and part."""
    contraction = _contraction(layer, part, len(inputs.shape))
    kernel = compose.merged(part)
    if inputs.dtype != kernel.dtype:  # integers, for example, which Keras would promote in the product
        inputs = keras.ops.cast(inputs, kernel.dtype)
    outputs = backend.contract(contraction, inputs, kernel, keras.ops.cast(part.variable.value, kernel.dtype))
    if layer.bias is not None:
        outputs = keras.ops.add(outputs, layer.bias)
    return outputs if layer.activation is None else layer.activation(outputs)


def _contraction(layer: keras.Layer, part: Part, rank: int) -> Contraction | None:
    if isinstance(layer, keras.layers.Dense):
        free = _letters("", rank - 1)
        return Contraction(free + "Y", "YZ", free + "Z", part, matmul=True)
    x, w, y = layer.equation.replace("->", ",").replace(" ", "").split(",")
    if "." in w:
        return None
    free = _letters(x + w + y, rank - len(x.replace("...", "")))
    x, y = x.replace("...", free), y.replace("...", free)
    labels_repeat = any(len(set(side)) != len(side) for side in (x, w, y))
    covered = set(w) <= set(x) | set(y) and set(x) <= set(w) | set(y) and set(y) <= set(x) | set(w)
    return Contraction(x, w, y, part, matmul=False) if covered and not labels_repeat else None


def _letters(used: str, count: int) -> str:
    """So many letters that do not occur yet."""
    return "".join(letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWX" if letter not in used)[: max(count, 0)]
