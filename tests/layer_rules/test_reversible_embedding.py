"""ReversibleEmbedding: both directions of one table, or a table and a projection of its own, as in plain Keras."""

import keras
import numpy as np
import pytest
from helpers import cases, check_steps, moved_outside, values

import finetooth as ft

L = keras.layers
TOKENS = np.array([[2, 2, 3, 0], [4, 6, 2, 1], [5, 3, 3, 2]])


def trained(selection, layer_rules, steps=2, **options):
    """Weights before and after some steps of plain Keras or of the part alone, and the names in the table."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    table = L.ReversibleEmbedding(7, 5, name="table", **options)
    words = keras.Input((4,), dtype="int32")
    hidden = L.Dense(5, "tanh", name="hidden", trainable=False, dtype=options.get("dtype"))(table(words))
    model = keras.Model(words, table(hidden, reverse=True))
    before = values(model)
    names, tuning = {}, None
    if layer_rules is not None:
        chosen = [selection] if isinstance(selection, str) else selection
        tuning = ft.tune(model, ft.select(model, *chosen), layer_rules=layer_rules)
        names = {row[0]: row[-1] for row in tuning.table().rows}
    model.compile(keras.optimizers.SGD(1.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for _ in range(steps):
        model.train_on_batch(TOKENS, np.roll(TOKENS, 1, axis=1))
    if tuning:
        tuning.finish()
        assert moved_outside(before, values(model), tuning.selection) == {}
    return before, values(model), names


CASES = {
    "tied": ("table/embeddings[2:5]", {}, {"table/embeddings": "rows"}),
    "tied, scattered": ("table/embeddings[[0, 3, 6]]", {}, {"table/embeddings": "rows"}),
    "capped": ("table/embeddings[2:5]", {"logit_soft_cap": 2.0}, {"table/embeddings": "rows"}),
    "two tables": (
        ["table/embeddings[2:5]", "table/reverse_embeddings[1:3, ::2]"],
        {"tie_weights": False},
        {"table/embeddings": "rows", "table/reverse_embeddings": "slice"},
    ),
    "only the projection": (
        "table/reverse_embeddings[:, 4:]",
        {"tie_weights": False},
        {"table/reverse_embeddings": "slice"},
    ),
    "only the table": ("table/embeddings[2:5]", {"tie_weights": False}, {"table/embeddings": "rows"}),
    "columns of the table": ("table/embeddings[:, 1:3]", {}, {"table/embeddings": "dense"}),
    "with a mask": ("table/embeddings[2:5]", {"mask_zero": True}, {"table/embeddings": "dense"}),
}


@pytest.mark.parametrize("case", CASES)
def test_one_step_equals_plain_keras_in_both_directions(case):
    selection, options, names = CASES[case]
    before, expected, _ = trained(selection, None, steps=1, **options)
    _, after, shown = trained(selection, True, steps=1, **options)
    assert shown == names
    keras.backend.clear_session(free_memory=False)
    for path in names:
        moved = after[path] != before[path]
        assert moved.any()
        np.testing.assert_allclose(after[path][moved], expected[path][moved], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "case"),
    cases(
        ["float32", "bfloat16", "mixed_bfloat16"],
        ["tied", "capped", "two tables"],
        quick=lambda dtype, case: dtype == "mixed_bfloat16" or (dtype, case) == ("bfloat16", "tied"),
    ),
)
def test_the_rule_equals_the_composed_read(dtype, case):
    selection, options, _ = CASES[case]
    before, by_rule, names = trained(selection, True, dtype=dtype, **options)
    _, composed, _ = trained(selection, False, dtype=dtype, **options)
    check_steps(by_rule, composed, before, names, 1e-4 if dtype == "float32" else 0.05)


def test_a_projection_in_another_precision():
    selection, options, _ = CASES["tied"]
    before, by_rule, names = trained(selection, True, reverse_dtype="float16", **options)
    _, composed, _ = trained(selection, False, reverse_dtype="float16", **options)
    check_steps(by_rule, composed, before, names, 0.05)
