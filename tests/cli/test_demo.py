"""The demo's claims, with a smaller budget."""

import io
import re

import keras
import numpy as np
import pytest
from rich.console import Console

import finetooth as ft
from finetooth.cli import demo


@pytest.fixture(scope="module")
def page():
    return Console(file=io.StringIO(), width=110, color_system=None)


@pytest.fixture(scope="module")
def outcomes(page):
    return demo.run(0, page, base_steps=60, steps=12)


@pytest.fixture
def digits():
    return demo.load(0)


@pytest.fixture
def base():
    return demo.build()


def test_nothing_frozen_moves_under_finetooth_and_nearly_all_does_under_masks(outcomes):
    full, masked, ours = outcomes
    frozen = full.trained - ours.trained
    assert full.frozen_moved is None
    assert masked.frozen_moved > 0.9 * frozen
    assert ours.frozen_moved == 0


def test_cost_follows_the_part(outcomes):
    full, masked, ours = outcomes
    assert ours.trained == masked.trained < 0.1 * full.trained
    # Two moments of float32 for each trained element, and a few scalars.
    assert 8 * ours.trained <= ours.optimizer_bytes < 8 * ours.trained + 64
    assert 8 * full.trained <= full.optimizer_bytes == masked.optimizer_bytes < 8 * full.trained + 64
    assert ours.patch_bytes == 4 * ours.trained
    assert masked.patch_bytes > 0.9 * 4 * full.trained


def test_the_page_has_the_code_the_three_rows_and_the_proof(outcomes, page):
    text = page.file.getvalue()
    table = text[text.index("Same base") :]
    for way in (demo.FULL, demo.MASKED, demo.OURS):
        assert len(re.findall(rf"^  {way} +[\d.]+% +[\d.]+% ", table, re.MULTILINE)) == 1
    assert "with ft.tune(model, part) as tuning:" in text
    assert "Verified: all 61,636 frozen elements keep their bits." in " ".join(text.split())
    assert "the same model, bit for bit" in " ".join(text.split())


def test_masks_reach_the_optimizer(base, digits):
    """Outside the part only decay moves the masked weights, so the gradients there were indeed zero."""
    model, steps = demo.copy_of(base), 6
    demo.fit(model, demo.masked_adamw(model), demo.stream(digits.arriving, steps, np.random.default_rng(0)), 0)
    decayed = (1 - demo.LEARNING_RATE * demo.DECAY) ** steps
    for path in ("conv_1", "conv_2"):
        before, after = base.get_layer(path).get_weights()[0], model.get_layer(path).get_weights()[0]
        np.testing.assert_allclose(after, before * decayed, rtol=1e-5)
    kernel = [m.get_layer("conv_3").get_weights()[0] for m in (base, model)]
    np.testing.assert_allclose(kernel[1][..., 4:], kernel[0][..., 4:] * decayed, rtol=1e-5)
    assert np.abs(kernel[1][..., :4] - kernel[0][..., :4] * decayed).max() > demo.LEARNING_RATE


def test_the_shown_code_is_what_runs(base, digits):
    images = demo.stream(digits.arriving, 6, np.random.default_rng(0))
    shown, run = demo.copy_of(base), demo.copy_of(base)
    names = {"ft": ft, "keras": keras, "model": shown, "loss": demo.LOSS, "images": images[0], "labels": images[1]}
    exec(demo.code(), names)  # the demo's own text, as a reader would paste it
    demo.tune_part(run, images, Console(file=io.StringIO()))
    assert ft.diff(shown, run).size == 0
    assert names["tuning"].patch.size == ft.select(base, *demo.PART).size


def test_digits_are_split_as_told(digits):
    labels = digits.arriving[1]
    assert set(digits.old[1]) == set(range(8))
    assert [int(np.sum(labels == digit)) for digit in range(8)] == [demo.KEPT] * 8
    assert set(digits.test[1]) == set(range(10))
    seen = {picture.tobytes() for picture in np.concatenate([digits.old[0], digits.arriving[0]])}
    assert not any(picture.tobytes() in seen for picture in digits.test[0])


def test_stream_is_whole_passes_in_a_fixed_order(digits):
    first, again = (demo.stream(digits.arriving, 20, np.random.default_rng(3)) for _ in range(2))
    assert first[0].shape == (20 * demo.BATCH, 8, 8, 1)
    np.testing.assert_array_equal(first[1], again[1])
    one_pass = first[1][: len(digits.arriving[1])]
    np.testing.assert_array_equal(np.sort(one_pass), np.sort(digits.arriving[1]))


def test_moved_outside_counts_bits_outside_the_part(base):
    model = demo.copy_of(base)
    kernel = model.get_layer("conv_3").kernel
    value = keras.ops.convert_to_numpy(kernel).copy()
    value[0, 0, 0, 3:6] += 1.0  # channel 3 is in the part, 4 and 5 are not
    kernel.assign(value)
    assert demo.moved_outside(ft.diff(base, model), ft.select(base, *demo.PART)) == 2
