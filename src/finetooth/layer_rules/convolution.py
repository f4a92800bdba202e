"""Convolutions with a slice of their kernel selected: the backward computes the slice's gradient, and little more.

An output channel of a convolution is a sum over input channels and over taps, the kernel's spatial axes. So the
gradient for a slice of the kernel is that of a smaller convolution, from the input channels that the slice reads to the
output channels that it writes. The same goes for taps: the gradient for the smallest box around them is that of a
smaller kernel on an input cropped to what it meets. Where the crop would depend on the size of the input (strides with
"same" padding), and for transposed convolutions, all taps of the selected channels are computed and some of them taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from ..backends import backend
from ..backends.tensor_region import TensorRegion
from ..parts.trainable import TrainablePart
from ..regions.region import Grid, grid
from .contraction import SLICE, contract
from .rule import Rule

PLAIN = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
DEPTHWISE = (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
SEPARABLE = (keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
TRANSPOSED = (keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose)

Margins = list[tuple[int, int]]  # zeros before and after the input, for each spatial axis; negative ones crop it


@dataclass(frozen=True)
class Channels:
    """The smallest convolution that holds a slice of a kernel: its channels, and what it has of the last two axes."""

    inputs: TensorRegion
    outputs: TensorRegion
    kernel: tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Stage:
    """One convolution of a layer, as the layer does it."""

    kernel: keras.Variable
    run: Callable[..., Any]  # of input, kernel and padding
    channels: Callable[..., Channels]  # of the kernel's shape and a choice along its last two axes
    channels_last: bool
    padding: str = "valid"
    dilation: tuple[int, ...] = ()
    margins: Margins | None = None  # what the padding adds, where that is the same for every input

    def apply(self, x: Any, kernel: Any) -> Any:
        if self.padding == "causal":
            return self.apply_within(self.margins, x, kernel)
        return self.run(x, kernel, padding=self.padding)

    def apply_within(self, margins: Margins | None, x: Any, kernel: Any) -> Any:
        """As `apply`, with other margins than the padding's."""
        if margins is None:
            return self.apply(x, kernel)
        around, inside = [(0, 0)] * len(x.shape), [slice(None)] * len(x.shape)
        for axis, (before, after) in enumerate(margins, 1 if self.channels_last else 2):
            around[axis] = max(before, 0), max(after, 0)
            inside[axis] = slice(max(-before, 0), min(after, 0) or None)
        return self.run(keras.ops.pad(x, around)[tuple(inside)], kernel, padding="valid")

    def restrict(self, region: TensorRegion, value: Any) -> Any:
        """Return a region along the channels of an input or output."""
        for _, where in region.axes:
            value = backend.take(value, len(value.shape) - 1 if self.channels_last else 1, where)
        return value


class Convolution:
    """A stage whose kernel has a part, with what its backward needs: see `contract.Operation`."""

    def __init__(self, stage: Stage, region: Grid):
        *taps, rows, columns = (np.asarray(axis) for axis in region.axes)
        box, self._margins = _box(stage, region.shape[:-2], taps)
        self._stage = stage
        self._channels = stage.channels(region.shape, rows, columns)
        computed = (*box, *self._channels.kernel)  # the entries of each axis of the kernel with a gradient computed,
        self._shape = tuple(len(entries) for entries in computed)
        selected = [np.searchsorted(entries, axis) for entries, axis in zip(computed, region.axes)]  # where in these
        self._part = _tensor_region(self._shape, *selected)  # the selected ones are

    def forward(self, x: Any, kernel: Any) -> Any:
        return self._stage.apply(x, kernel)

    def gradient_x(self, dy: Any, kernel: Any, x: Any) -> Any:
        return backend.linear_vjp(lambda x: self.forward(x, kernel), x, dy)

    def keep(self, x: Any) -> Any:
        return self._stage.restrict(self._channels.inputs, x)

    def gradient_part(self, kept: Any, dy: Any) -> Any:
        def small(kernel: Any) -> Any:
            return self._stage.apply_within(self._margins, kept, kernel)

        dy = self._stage.restrict(self._channels.outputs, dy)
        return self._part.gather(backend.linear_vjp(small, keras.ops.zeros(self._shape, dy.dtype), dy))


def rule(layer: keras.Layer, parts: Collection[TrainablePart]) -> Rule | None:
    """The rule for a stock layer of which grids of kernels are selected; a kernel without is read as ever."""
    stages = _stages(layer)
    read = {
        stage: (Convolution(stage, part.region), part)
        for stage in stages
        for part in parts
        if part.base is stage.kernel and isinstance(part.region, Grid)
    }
    if not read:
        return None

    def call(inputs: Any) -> Any:
        outputs = inputs
        for stage in stages:
            outputs = contract(*read[stage], outputs) if stage in read else stage.apply(outputs, stage.kernel)
        if layer.bias is not None:
            shape = [1] * len(outputs.shape)
            shape[-1 if stages[0].channels_last else 1] = -1
            outputs = keras.ops.add(outputs, keras.ops.reshape(layer.bias, shape))
        return outputs if layer.activation is None else layer.activation(outputs)

    return Rule({part: SLICE for _, part in read.values()}, call)


def _stages(layer: keras.Layer) -> list[Stage]:
    """What a stock layer does, one convolution after the other; nothing for any other layer."""
    kind = type(layer)
    if kind not in PLAIN + DEPTHWISE + SEPARABLE + TRANSPOSED or (kind in PLAIN and layer.lora_enabled):
        return []
    form = {"data_format": layer.data_format}
    options = {**form, "strides": layer.strides, "dilation_rate": layer.dilation_rate}
    last = layer.data_format == "channels_last"
    if kind in TRANSPOSED:
        run = functools.partial(keras.ops.conv_transpose, output_padding=layer.output_padding, **options)
        return [Stage(layer.kernel, run, _transposed, last, layer.padding)]
    padding = last, layer.padding, layer.dilation_rate, _margins(layer)
    if kind in PLAIN:
        channels = functools.partial(_plain, layer.groups)
        return [Stage(layer.kernel, functools.partial(keras.ops.conv, **options), channels, *padding)]
    depthwise = functools.partial(keras.ops.depthwise_conv, **options)
    if kind in DEPTHWISE:
        return [Stage(layer.kernel, depthwise, _depthwise, *padding)]
    # Dilation is nothing to a single tap, but Keras has it, and another algorithm may be chosen for it.
    pointwise = functools.partial(keras.ops.conv, dilation_rate=layer.dilation_rate, **form)
    return [
        Stage(layer.depthwise_kernel, depthwise, _depthwise, *padding),
        Stage(layer.pointwise_kernel, pointwise, functools.partial(_plain, 1), last),
    ]


def _margins(layer: keras.Layer) -> Margins | None:
    """What the layer's padding adds to the input, where that does not depend on the input's size."""
    reaches = [(length - 1) * dilation for length, dilation in zip(layer.kernel_size, layer.dilation_rate)]
    if layer.padding == "same":
        return [(reach // 2, reach - reach // 2) for reach in reaches] if max(layer.strides) == 1 else None
    return [(reach if layer.padding == "causal" else 0, 0) for reach in reaches]


def _box(stage: Stage, shape: tuple[int, ...], taps: list[np.ndarray]) -> tuple[list[np.ndarray], Margins | None]:
    """The smallest box around the taps, with the margins by which a kernel of only these meets what they do."""
    box = [np.arange(own[0], own[-1] + 1) for own in taps]
    if stage.margins is None or tuple(map(len, box)) == shape:
        return [np.arange(length) for length in shape], None
    margins = [
        (before - step * int(own[0]), after - step * (length - 1 - int(own[-1])))
        for (before, after), step, own, length in zip(stage.margins, stage.dilation, box, shape)
    ]
    return box, margins


def _plain(groups: int, shape: tuple[int, ...], rows: np.ndarray, columns: np.ndarray) -> Channels:
    """Kernel rows are the inputs of a group, columns are outputs: only groups that hold one of these take part."""
    inputs, outputs = shape[-2], shape[-1] // groups
    held, counts = np.unique(columns // outputs, return_counts=True)
    if counts.min() < counts.max():  # all groups of a convolution are equally wide
        columns = _pairs(held, outputs, np.arange(outputs))
    read = _tensor_region((inputs * groups,), _pairs(held, inputs, rows))
    return Channels(read, _tensor_region((shape[-1],), columns), (rows, columns))


def _depthwise(shape: tuple[int, ...], rows: np.ndarray, columns: np.ndarray) -> Channels:
    """Kernel rows are inputs, of each of which there is an output for every column."""
    written = _tensor_region((shape[-2] * shape[-1],), _pairs(rows, shape[-1], columns))
    return Channels(_tensor_region((shape[-2],), rows), written, (rows, columns))


def _transposed(shape: tuple[int, ...], rows: np.ndarray, columns: np.ndarray) -> Channels:
    """Kernel rows are outputs, columns are inputs."""
    return Channels(_tensor_region((shape[-1],), columns), _tensor_region((shape[-2],), rows), (rows, columns))


def _pairs(outer: np.ndarray, width: int, inner: np.ndarray) -> np.ndarray:
    """The entries `inner` of each of the blocks `outer`, each `width` wide."""
    return (outer[:, None] * width + inner).ravel()


def _tensor_region(shape: tuple[int, ...], *chosen: np.ndarray) -> TensorRegion:
    return TensorRegion(grid(shape, chosen))
