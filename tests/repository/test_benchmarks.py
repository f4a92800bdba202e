"""The benchmark measures what it says: at toy sizes, its contenders train the same part and freeze the rest."""

import importlib
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import goals
import plot
import report
import selective
import workloads
from contenders import initial
from measure import timed

SMALL = {w.name: w for w in (workloads.slices(16, 2), workloads.rows(40, 8), workloads.everything(8, 2))}
SAME_PART = {  # contenders that train the same elements from the same start with the same optimizer
    "slice": ["finetooth", "finetooth, own loop", "masked gradient", "hand-written floor"],
    "rows": ["finetooth", "finetooth, own loop"],
}


@pytest.mark.parametrize("name", SAME_PART)
def test_contenders_with_the_same_part_end_with_the_same_weights(name):
    workload = SMALL[name]
    data = workload.data(2)
    ends = {}
    for contender_name in SAME_PART[name]:
        contender = workload.contenders[contender_name](data)
        contender.epoch()
        ends[contender_name] = contender.weights()
        assert not contender.moved()
    first = ends.pop(SAME_PART[name][0])
    # Two steps of Adam are up to 2e-4 long; PyTorch's puts its epsilon elsewhere.
    assert max(np.abs(values - initial(path, values.shape)).max() for path, values in first.items()) > 1e-4
    for other in ends.values():
        assert set(other) == set(first)
        for path, values in first.items():
            np.testing.assert_allclose(other[path], values, rtol=0, atol=1e-5)


def test_a_masked_gradient_with_weight_decay_is_seen_to_move_frozen_weights():
    contender = SMALL["slice"].contenders["masked gradient, AdamW"](SMALL["slice"].data(1))
    contender.epoch()
    assert contender.moved() > 300  # of 2 x 16 x 16 kernel elements, of which 2 x 4 x 4 may move


def test_lora_and_frozen_variables_keep_the_base_and_train_something():
    for name in ("Keras enable_lora(8)", "biases only (floor)"):
        contender = SMALL["slice"].contenders[name](SMALL["slice"].data(1))
        contender.epoch()
        assert contender.moved() == 0
        assert contender.given() > 0 and contender.state() == 2 * contender.given()


def test_a_run_becomes_tables_goals_and_a_picture(tmp_path):
    workload = SMALL["everything"]
    rows = timed({**workload.contenders, "broken": lambda data: 1 / 0}, workload.data(1), 0.0)
    assert rows["broken"]["error"] == "ZeroDivisionError: division by zero"
    for name in workload.contenders:
        assert rows[name]["ms"] > 0 and rows[name]["spread"] >= 1 and rows[name]["rounds"] == 3
    result = {
        "versions": "none",
        "workloads": {"everything": {"title": workload.title, "contenders": rows, "seconds": 0.0}},
    }
    backend = keras.backend.backend()
    assert "division by zero" in report.tables(backend, result)
    table = goals.goals_table({backend: result})
    assert [row[0] for row in table.rows] == ["everything", "all", "all"]
    assert [row[4:] for row in table.rows[1:]] == [("2", "reached"), ("0", "reached")]
    plot.plot({backend: result}, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_goals_name_workloads_and_contenders_that_exist(monkeypatch):
    monkeypatch.setattr(workloads, "available_memory", lambda: 2**60)
    known = {w.name: set(w.contenders) for w in workloads.all_workloads()}
    peers = {"factored LoRA, r=8", "PEFT TrainableTokens"}
    for goal in goals.GOALS:
        if keras.backend.backend() in goal.backends:
            assert {goal.over, goal.under} <= known[goal.workload] | peers


@pytest.mark.parametrize("way", ["indexed", "sampled"])
def test_steps_on_a_share_of_a_batch_are_plain_training_when_the_share_is_all(way):
    native = importlib.import_module(f"selective_{keras.backend.backend()}")

    def trained(kind):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        model = selective.compiled(kind(inputs, keras.layers.Dense(3)(keras.layers.Dense(5, "tanh")(inputs))))
        rng = np.random.default_rng(0)
        model.fit(rng.normal(size=(12, 4)), rng.integers(0, 3, 12), batch_size=4, shuffle=False, verbose=0)
        return model.get_weights()

    for own, expected in zip(trained(getattr(native, way)(1.0)), trained(keras.Model), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)
