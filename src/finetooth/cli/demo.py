"""`finetooth demo`: two new classes for a digits model, trained in three ways from the same base with the same budget.

The base knows the digits 0 to 7; its output layer has ten columns, as if more were to come. Then 8 and 9 arrive, and
of the old digits only a few images are still at hand. All three ways see the same batches in the same order under
AdamW with the same settings; accuracy is measured on images no way has seen, over all ten outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from rich.console import Console
from rich.syntax import Syntax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import finetooth as ft

from ..display.format import share, size
from ..display.table import Table
from ..keras_internals.weights import selectable

FIRST_NEW = 8  # the digits 0 to 7 are old, 8 and 9 are new
KEPT = 5  # images of each old digit that are still at hand when the new ones arrive
BATCH = 32
BASE_STEPS, STEPS = 400, 140
LEARNING_RATE, DECAY = 1e-3, 0.01
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

FULL, MASKED, OURS = "full", "masked", "finetooth"

# The two new columns of the output layer, and 4 of the 64 channels of the last convolution.
PART = ("digit/*[..., 8:10]", "conv_3/*[..., :4]")

Images = tuple[np.ndarray, np.ndarray]  # pictures and their labels


@dataclass(frozen=True)
class Digits:
    """The images to train on, and those to measure accuracy on."""

    old: Images
    arriving: Images
    test: Images


@dataclass(frozen=True)
class Outcome:
    """The result of one way. `frozen_moved` is None where nothing was meant to stay."""

    way: str
    new_accuracy: float
    old_accuracy: float
    trained: int
    optimizer_bytes: int
    patch_bytes: int
    frozen_moved: int | None


class MaskedAdamW(keras.optimizers.AdamW):
    """AdamW as the popular recipe has it: gradients are multiplied by 0/1 masks, and stock AdamW does the rest."""

    def __init__(self, masks: Sequence[np.ndarray], **settings: Any):
        super().__init__(**settings)
        self.masks = masks

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        masked = [keras.ops.multiply(grad, mask) for grad, mask in zip(grads, self.masks)]
        super().apply(masked, trainable_variables)


def load(seed: int) -> Digits:
    """Load scikit-learn's digits, split into images for the base, images that arrive later, and a test set."""
    pictures, labels = load_digits(return_X_y=True)
    pictures = (pictures / 16).astype("float32").reshape(-1, 8, 8, 1)
    x, x_test, y, y_test = train_test_split(pictures, labels, test_size=0.3, random_state=seed, stratify=labels)
    new = np.flatnonzero(y >= FIRST_NEW)
    kept = np.concatenate([np.flatnonzero(y == digit)[:KEPT] for digit in range(FIRST_NEW)])
    arriving = np.concatenate([new, kept])
    old = np.flatnonzero(y < FIRST_NEW)
    return Digits((x[old], y[old]), (x[arriving], y[arriving]), (x_test, y_test))


def stream(images: Images, steps: int, rng: np.random.Generator) -> Images:
    """Return shuffled passes over the images, one after the other, for this number of steps."""
    count = len(images[1])
    passes = -(-steps * BATCH // count)
    order = np.concatenate([rng.permutation(count) for _ in range(passes)])[: steps * BATCH]
    return images[0][order], images[1][order]


def build() -> keras.Model:
    """Build a small convolutional model with ten outputs."""
    conv = {"kernel_size": 3, "padding": "same", "activation": "relu"}
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, **conv, name="conv_1"),
            keras.layers.Conv2D(64, **conv, name="conv_2"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, **conv, name="conv_3"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, name="digit"),
        ],
        name="digits",
    )


def copy_of(base: keras.Model) -> keras.Model:
    """Return a model of the same architecture with the same weights."""
    model = build()
    model.set_weights(base.get_weights())
    return model


def adamw() -> Any:
    """Make the optimizer that every way uses."""
    return keras.optimizers.AdamW(LEARNING_RATE, weight_decay=DECAY)


def verbosity(console: Console) -> int:
    """Return the verbosity of `fit`: a progress bar in a terminal, one line elsewhere."""
    return 1 if console.is_terminal else 2


def fit(model: keras.Model, optimizer: Any, images: Images, verbose: int) -> None:
    """Train one pass over a stream, in its order."""
    model.compile(optimizer, LOSS)
    model.fit(*images, batch_size=BATCH, shuffle=False, verbose=verbose)


def tune_part(model: keras.Model, images: Images, console: Console) -> tuple[Any, ft.Tuning]:
    """Train the part with finetooth, by the lines that `code` shows, and print the table of the tuning."""
    optimizer = adamw()
    with ft.tune(model, ft.select(model, *PART)) as tuning:
        console.print(tuning)
        fit(model, optimizer, images, verbosity(console))
    return optimizer, tuning


def code() -> str:
    """Return the lines that a user would write for `tune_part`."""
    part = ", ".join(f'"{text}"' for text in PART)
    return (
        f"part = ft.select(model, {part})\n"
        "with ft.tune(model, part) as tuning:\n"
        f"    model.compile(keras.optimizers.AdamW({LEARNING_RATE}, weight_decay={DECAY}), loss)\n"
        f"    model.fit(images, labels, batch_size={BATCH}, shuffle=False)\n"
    )


def masked_adamw(model: keras.Model) -> MaskedAdamW:
    """Make an AdamW whose gradients are zero outside the part."""
    part = ft.select(model, *PART)
    regions = {id(variable): part[path] for path, variable in selectable(model).items()}
    masks = [regions[id(variable)].mask().astype("float32") for variable in model.trainable_variables]
    return MaskedAdamW(masks, learning_rate=LEARNING_RATE, weight_decay=DECAY)


def accuracies(model: keras.Model, test: Images) -> tuple[float, float]:
    """Return the accuracy on new and on old digits, among all ten."""
    pictures, labels = test
    right = model.predict(pictures, verbose=0).argmax(axis=1) == labels
    return float(right[labels >= FIRST_NEW].mean()), float(right[labels < FIRST_NEW].mean())


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of everything the optimizer holds."""
    return sum(keras.ops.convert_to_numpy(variable).nbytes for variable in optimizer.variables)


def moved_outside(difference: ft.Patch, part: ft.Selection) -> int:
    """Count the elements outside the part that differ in any bit."""
    return sum((change.region - part[path]).size for path, change in difference.items())


def compare(base: keras.Model, digits: Digits, images: Images, console: Console) -> tuple[list[Outcome], ft.Tuning]:
    """Train a copy of the base in each of the three ways."""
    verbose = verbosity(console)
    part = ft.select(base, *PART)

    console.print("\n[bold]1. Full fine-tuning[/]: AdamW trains every weight.")
    full, optimizer = copy_of(base), adamw()
    fit(full, optimizer, images, verbose)
    patch = ft.diff(base, full)
    first = Outcome(FULL, *accuracies(full, digits.test), part.total, state_bytes(optimizer), patch.nbytes, None)

    console.print("\n[bold]2. Masked gradients[/]: AdamW again, gradients times 0 outside the part.")
    held, optimizer = copy_of(base), masked_adamw(base)
    fit(held, optimizer, images, verbose)
    patch, state = ft.diff(base, held), state_bytes(optimizer)
    moved = moved_outside(patch, part)
    second = Outcome(MASKED, *accuracies(held, digits.test), part.size, state, patch.nbytes, moved)

    console.print("\n[bold]3. finetooth[/]: the part is a variable of its own, and AdamW sees nothing else.\n")
    console.print(Syntax(code(), "python", theme="ansi_dark", background_color="default", word_wrap=True))
    tuned = copy_of(base)
    optimizer, tuning = tune_part(tuned, images, console)
    moved, state = moved_outside(ft.diff(base, tuned), part), state_bytes(optimizer)
    third = Outcome(OURS, *accuracies(tuned, digits.test), part.size, state, tuning.patch.nbytes, moved)
    return [first, second, third], tuning


def comparison(outcomes: Sequence[Outcome], base: tuple[float, float], counts: tuple[int, int], total: int) -> Table:
    """One row per way. `base` are its accuracies, `counts` the test images: new, old each; `total` is all weights."""
    rows = [
        (
            o.way,
            f"{o.new_accuracy:.1%}",
            f"{o.old_accuracy:.1%}",
            f"{o.trained:,}",
            size(o.optimizer_bytes),
            size(o.patch_bytes),
            "-" if o.frozen_moved is None else f"{o.frozen_moved:,}",
        )
        for o in outcomes
    ]
    columns = ("way", "8 and 9", "0 to 7", "weights trained", "optimizer state", "to send", "frozen, but moved")
    return Table(
        title="Same base, same batches, same AdamW",
        columns=columns,
        rows=rows,
        right=columns[1:],
        caption=(
            f"8 and 9, 0 to 7: accuracy on {counts[0]} and {counts[1]} held-out images, over all ten outputs; "
            f"the base has {base[0]:.1%} and {base[1]:.1%}",
            "optimizer state: the bytes of optimizer.variables",
            "to send: the bytes of the new values, ft.diff(base, model).nbytes or tuning.patch.nbytes",
            f"frozen, but moved: weights outside the part, of {total:,} in all, with any bit different from the base's",
        ),
    )


def conclusions(outcomes: Sequence[Outcome], tuning: ft.Tuning, applies: bool) -> list[str]:
    """Say in words what the table shows."""
    full, held, ours = outcomes
    frozen = tuning.selection.total - tuning.selection.size
    same = "the same model, bit for bit" if applies else "ANOTHER model, which is a bug: please report it"
    return [
        f"Masked gradients did not freeze: {held.frozen_moved:,} of the {frozen:,} weights that were to stay have "
        "moved, because weight decay needs no gradient. Their optimizer state and the bytes to send are those of "
        "the whole model.",
        f"finetooth trained the same {share(ours.trained, full.trained)} of the weights with "
        f"{size(ours.optimizer_bytes)} of optimizer state, and {ours.frozen_moved:,} others moved. tuning.verify() "
        f"says: {tuning.verify()}",
        f"Its patch of {size(ours.patch_bytes)}, applied to a fresh copy of the base, gives {same}. Accuracies change "
        "by some images with the seed and the backend; the last column does not.",
    ]


def run(seed: int, console: Console, base_steps: int = BASE_STEPS, steps: int = STEPS) -> list[Outcome]:
    """Run the whole demo."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    digits = load(seed)
    labels = digits.test[1]
    console.print(
        f"[bold]A base model[/] learns the digits 0 to 7 from {len(digits.old[1]):,} images "
        f"(Keras {keras.__version__} on {keras.backend.backend()})."
    )
    base = build()
    fit(base, adamw(), stream(digits.old, base_steps, rng), verbosity(console))
    before = accuracies(base, digits.test)
    arriving = stream(digits.arriving, steps, rng)
    console.print(
        f"\n[bold]Then 8 and 9 arrive[/]: {len(digits.arriving[1]) - KEPT * FIRST_NEW} images, and of each old digit "
        f"only {KEPT} are still at hand.\nThree ways to learn them, {steps} steps each:"
    )
    outcomes, tuning = compare(base, digits, arriving, console)
    receiver = copy_of(base)
    tuning.patch.apply(receiver)
    applies = ft.diff(receiver, tuning.model).size == 0
    new = int(np.count_nonzero(labels >= FIRST_NEW))
    console.print()
    console.print(comparison(outcomes, before, (new, len(labels) - new), tuning.selection.total))
    for sentence in conclusions(outcomes, tuning, applies):
        console.print(f"\n{sentence}", markup=False)
    return outcomes
