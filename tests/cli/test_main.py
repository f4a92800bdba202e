"""The command line: what it prints, where, and with which exit code."""

import os
import re
import subprocess
import sys

import keras
import pytest

from finetooth import __version__
from finetooth.cli.main import main


@pytest.fixture
def saved(tmp_path):
    """A saved model with a frozen layer and with statistics."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, name="first"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(2, name="last", trainable=False),
        ],
        name="small",
    )
    path = tmp_path / "small.keras"
    model.save(path)
    return path


def command(*arguments, code="import finetooth.cli.main as c, sys; sys.exit(c.main())"):
    """The command in a process of its own, where Keras is not loaded yet."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)


def row(text, path):
    """The cells of a table's row."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{path} ")]
    return re.split(r"\s{2,}", line.strip())


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"finetooth {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["demo", "--help"], ["inspect", "none.keras"]])
def test_keras_is_not_imported_where_it_is_not_needed(arguments):
    done = command(
        *arguments,
        code="import atexit, sys; atexit.register(lambda: print('keras' in sys.modules))\n"
        "import finetooth.cli.main as c; sys.exit(c.main())",
    )
    assert done.stdout.splitlines()[-1] == "False", "`import finetooth` must not import Keras before it is used"
    assert done.returncode == (2 if "inspect" in arguments else 0)


def test_module_runs_and_help_has_examples():
    done = subprocess.run([sys.executable, "-m", "finetooth", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "finetooth inspect base.keras" in done.stdout
    assert "demo" in done.stdout and "--backend" in done.stdout


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "COMMAND"),
        (["train"], "train"),
        (["--backend", "mxnet", "demo"], "mxnet"),
        (["demo", "--seed", "-1"], "received '-1'"),
        (["demo", "--seed", str(2**32)], "received '4294967296'"),
        (["inspect"], "MODEL.keras"),
    ],
)
def test_wrong_usage_is_explained(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_only_the_model_is_required(capsys):
    with pytest.raises(SystemExit):
        main(["inspect"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("are required: MODEL.keras")


def test_inspect_lists_every_weight(saved, capsys):
    assert main(["inspect", str(saved)]) == 0
    out = capsys.readouterr().out
    assert row(out, "first/kernel") == ["first/kernel", "(4, 3)", "float32", "12", "trainable"]
    assert row(out, "norm/moving_mean")[-1] == "statistic"
    assert row(out, "last/bias")[-1] == "frozen"
    assert "8 variables, 35 elements, 140 B" in out
    assert "can hold 29 of them" in out


def test_inspect_shows_a_selection(saved, capsys):
    assert main(["inspect", str(saved), "first/kernel[:, 1:]", "last/*"]) == 0
    out = capsys.readouterr().out
    assert row(out, "first/kernel") == ["first/kernel", "(4, 3)", "[:, 1:3]", "8", "66.7%"]
    assert "16 of 29 elements selected" in out
    assert "first/bias" not in out


def test_bad_selection_points_at_the_column(saved, capsys):
    assert main(["inspect", str(saved), "first/kernel[:, 1;]"]) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == "" and lines[0].startswith("finetooth: error: ")
    assert lines[1][lines[2].index("^")] == ";"


def test_selection_of_nothing_names_the_nearest(saved, capsys):
    assert main(["inspect", str(saved), "frist/kernel"]) == 2
    err = capsys.readouterr().err
    assert "first/kernel" in err and "Traceback" not in err


@pytest.mark.parametrize("name", ["model.h5", "model.HDF5"])
def test_hdf5_is_refused_even_if_it_exists(name, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(b"\x89HDF\r\n\x1a\n")
    assert main(["inspect", str(path)]) == 2
    assert "safe mode" in capsys.readouterr().err


def test_missing_and_other_files(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "no.keras")]) == 2
    assert "There is no file" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "model.pt")]) == 2
    assert "NAME.keras" in capsys.readouterr().err


def test_damaged_file_is_one_error(tmp_path, capsys):
    path = tmp_path / "damaged.keras"
    path.write_bytes(b"PK\x03\x04 and then nothing of use")
    assert main(["inspect", str(path)]) == 2
    err = capsys.readouterr().err
    assert "cannot be loaded" in err and "Traceback" not in err


def test_code_in_a_file_is_not_run(tmp_path, capsys):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: x + 1)])
    path = tmp_path / "code.keras"
    model.save(path)
    assert main(["inspect", str(path)]) == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_control_characters_in_errors_are_spelled_out(capsys):
    assert main(["inspect", "\x1b[31mred.pt"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_backend_of_a_running_keras_cannot_change(saved, capsys):
    running = keras.backend.backend()
    other = "jax" if running != "jax" else "torch"
    assert main(["--backend", other, "inspect", str(saved)]) == 2
    assert f"Keras runs on {running}" in capsys.readouterr().err
    assert main(["inspect", str(saved), "--backend", running]) == 0


def test_backend_is_chosen_before_keras_starts(saved, backend):
    other = "jax" if backend != "jax" else "torch"
    code = "import sys, finetooth.cli.main as c; c.main(); import keras; print(keras.backend.backend())"
    done = command("--backend", other, "inspect", str(saved), code=code)
    assert done.stdout.splitlines()[-1] == other
    assert done.stderr == ""


def test_demo_without_scikit_learn_says_what_to_install():
    code = "import sys; sys.modules['sklearn'] = None\nimport finetooth.cli.main as c; sys.exit(c.main())"
    done = command("demo", code=code)
    assert done.returncode == 2
    assert 'pip install "finetooth[demo]"' in done.stderr and "Traceback" not in done.stderr
