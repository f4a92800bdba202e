"""The recipes run, and prove what they say: a proof that fails ends its program with an error."""

import re
import runpy
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
SCRIPTS = sorted(RECIPES.glob("[0-9]*.py"))

# `make test` runs them on the quickest backend, `make test-all` on all.
pytestmark = [pytest.mark.long] if keras.backend.backend() != "torch" else []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_recipe(script, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(RECIPES))
    runpy.run_path(str(script), run_name="__main__")
    sys.modules.pop("proof")
    shown = capsys.readouterr().out
    source = script.read_text()
    for call, proof in (("unchanged", "outside: 0 of"), ("equal", "differs from the reference by")):
        assert shown.count(proof) >= len(re.findall(rf"^\s*{call}\(", source, re.M))
    assert "tuning.verify()" not in source or "Verified: all " in shown
    assert re.search("outside: 0 of|differs from the reference by|Verified: all ", shown)


def test_a_proof_can_fail(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    from proof import equal, unchanged

    before, after = np.zeros((2, 2), "float32"), np.eye(2, dtype="float32")
    unchanged(before, after, after == 1)
    with pytest.raises(SystemExit):
        unchanged(before, after, np.array([[True, False], [True, False]]))
    with pytest.raises(SystemExit):
        unchanged(before, before, after == 1)
    with pytest.raises(SystemExit):
        equal("ones", np.ones(3), [1, 1, 2])


def test_one_for_each_wish():
    assert [script.stem[:2] for script in SCRIPTS] == [f"{i:02}" for i in range(1, 16)]
