"""One small model for every class in `keras.layers` that has weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import keras
import numpy as np

L = keras.layers


class CustomLayer(L.Layer):
    """A layer as users write them: its own weights, read in its own way."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.mix = self.add_weight(shape=(shape[-1], shape[-1]), name="mix", regularizer="l2")

    def call(self, x):
        return keras.ops.tanh(keras.ops.matmul(x * self.scale, self.mix)) + x


# name -> (input shape, layer or function of the input); the classes whose names are not those of keras.layers are ours
LAYERS: dict[str, tuple[tuple[int, ...], Callable]] = {
    "BatchNormalization": ((5,), lambda x: L.BatchNormalization()(x)),
    "Bidirectional": ((5, 4), lambda x: L.Bidirectional(L.GRU(3))(x)),
    "Conv1D": ((7, 4), lambda x: L.Conv1D(3, 3)(x)),
    "Conv1DTranspose": ((7, 4), lambda x: L.Conv1DTranspose(3, 3)(x)),
    "Conv2D": ((6, 6, 4), lambda x: L.Conv2D(3, 3)(x)),
    "Conv2DTranspose": ((5, 5, 4), lambda x: L.Conv2DTranspose(3, 3)(x)),
    "Conv3D": ((4, 4, 4, 2), lambda x: L.Conv3D(3, 2)(x)),
    "Conv3DTranspose": ((3, 3, 3, 2), lambda x: L.Conv3DTranspose(3, 2)(x)),
    "ConvLSTM1D": ((3, 5, 2), lambda x: L.ConvLSTM1D(2, 3)(x)),
    "ConvLSTM2D": ((3, 4, 4, 2), lambda x: L.ConvLSTM2D(2, 3)(x)),
    "ConvLSTM3D": ((2, 3, 3, 3, 2), lambda x: L.ConvLSTM3D(2, 2)(x)),
    "Dense": ((5,), lambda x: L.Dense(4)(x)),
    "DepthwiseConv1D": ((7, 4), lambda x: L.DepthwiseConv1D(3)(x)),
    "DepthwiseConv2D": ((6, 6, 4), lambda x: L.DepthwiseConv2D(3)(x)),
    "EinsumDense": ((5, 4), lambda x: L.EinsumDense("abc,cde->abde", (5, 2, 3), bias_axes="de")(x)),
    "Embedding": ((6,), lambda x: L.Embedding(10, 4)(_tokens(x))),
    "GRU": ((5, 4), lambda x: L.GRU(3)(x)),
    "GRUCell": ((5, 4), lambda x: L.RNN(L.GRUCell(3))(x)),
    "GroupNormalization": ((6, 4), lambda x: L.GroupNormalization(2)(x)),
    "GroupedQueryAttention": ((5, 8), lambda x: L.GroupQueryAttention(4, 4, 2)(x, x)),
    "LSTM": ((5, 4), lambda x: L.LSTM(3)(x)),
    "LSTMCell": ((5, 4), lambda x: L.RNN(L.LSTMCell(3))(x)),
    "LayerNormalization": ((5,), lambda x: L.LayerNormalization()(x)),
    "MultiHeadAttention": ((5, 8), lambda x: L.MultiHeadAttention(2, 4)(x, x)),
    "PReLU": ((5,), lambda x: L.PReLU()(x - 1)),
    "RMSNormalization": ((5,), lambda x: L.RMSNormalization()(x)),
    "ReversibleEmbedding": ((6,), lambda x: _reversible(L.ReversibleEmbedding(10, 4), _tokens(x))),
    "SeparableConv1D": ((7, 4), lambda x: L.SeparableConv1D(3, 3)(x)),
    "SeparableConv2D": ((6, 6, 4), lambda x: L.SeparableConv2D(3, 3)(x)),
    "SimpleRNN": ((5, 4), lambda x: L.SimpleRNN(3)(x)),
    "SimpleRNNCell": ((5, 4), lambda x: L.RNN(L.SimpleRNNCell(3))(x)),
    "StackedRNNCells": ((5, 4), lambda x: L.RNN([L.GRUCell(3), L.SimpleRNNCell(2)])(x)),
    "RNN": ((5, 4), lambda x: L.RNN(L.GRUCell(3), unroll=True)(x)),
    "TimeDistributed": ((5, 4), lambda x: L.TimeDistributed(L.Dense(3))(x)),
    "AdditiveAttention": ((5, 4), lambda x: L.AdditiveAttention()([x, x])),
    "Attention": ((5, 4), lambda x: L.Attention(use_scale=True)([x, x])),
    "SpectralNormalization": ((5,), lambda x: L.SpectralNormalization(L.Dense(4))(x)),
    "CustomLayer": ((5,), lambda x: CustomLayer()(x)),
}

# Classes of keras.layers that hold nothing a gradient could train, or that are only names for others.
WEIGHTLESS = {
    "Activation", "ActivityRegularization", "Add", "AlphaDropout", "AugMix", "AutoContrast", "Average",
    "CategoryEncoding", "CenterCrop", "Concatenate", "ContrastLimitedAdaptiveHistogramEqualization", "CutMix",
    "Discretization", "Dot", "Dropout", "ELU", "Equalization", "Flatten", "GaussianDropout", "GaussianNoise",
    "HashedCrossing", "Hashing", "Identity", "InputLayer", "IntegerLookup", "Lambda", "Layer", "LeakyReLU",
    "Masking", "MaxNumBoundingBoxes", "Maximum", "MelSpectrogram", "Minimum", "MixUp", "Multiply", "Normalization",
    "Permute", "Pipeline", "RandAugment", "ReLU", "RepeatVector", "Rescaling", "Reshape", "Resizing",
    "STFTSpectrogram", "Softmax", "Solarization", "StringLookup", "Subtract", "TextVectorization",
    "UnitNormalization", "Wrapper",
}  # fmt: skip
WEIGHTLESS_PREFIXES = ("Random", "Spatial", "UpSampling", "ZeroPadding", "Cropping", "Global", "Adaptive", "Max", "Av")
# Wrap code of one framework. JaxLayer and TorchModuleWrapper have tests of their own; the other two cannot be trained
# here: FlaxLayer needs Flax, TFSMLayer is for inference.
FOREIGN = {"FlaxLayer", "JaxLayer", "TFSMLayer", "TorchModuleWrapper"}


def classes() -> set[str]:
    """Every layer class that `keras.layers` exports, under the name it was defined with."""
    found = {c.__name__ for c in vars(L).values() if inspect.isclass(c) and issubclass(c, L.Layer)}
    return {name for name in found if name not in WEIGHTLESS and not name.startswith(WEIGHTLESS_PREFIXES)}


def model_with(name: str) -> keras.Model:
    """A model around the layer, the same each time, with weights that differ from their initial zeros and ones."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    shape, apply = LAYERS[name]
    inputs = keras.Input(shape)
    outputs = L.Dense(2, name="head")(L.Flatten()(apply(inputs)))
    model = keras.Model(inputs, outputs)
    rng = np.random.default_rng(1)
    for weight in model.weights:
        if "variance" not in weight.path:
            weight.assign(keras.ops.convert_to_numpy(weight) + rng.normal(0, 0.2, weight.shape))
    return model


def data_for(name: str, examples: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    x = rng.uniform(0, 1, (examples, *LAYERS[name][0])).astype("float32")
    return x, rng.normal(size=(examples, 2)).astype("float32")


def _tokens(x):
    return keras.ops.cast(x * 10, "int32")


def _reversible(layer, tokens):
    return layer(layer(tokens), reverse=True)
