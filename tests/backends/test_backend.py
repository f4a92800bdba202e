"""The backend that was asked for is the one that runs."""

import os
import subprocess
import sys

import keras
import pytest

import finetooth.backends


def test_the_backend_asked_for_is_the_one_tested(backend):
    assert keras.backend.backend() == backend
    assert finetooth.backends.backend.__name__ == f"finetooth.backends.{backend}"


@pytest.mark.parametrize("first", ["keras", "finetooth"])
def test_importing_finetooth_leaves_the_choice_of_backend_to_keras(first, backend):
    program = f"import {first}, keras, finetooth, os; print(keras.backend.backend(), os.environ['KERAS_BACKEND'])"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.split() == [os.environ["KERAS_BACKEND"]] * 2


def test_a_backend_that_trains_nothing_is_one_clear_error():
    """One process: the backend is chosen when Keras is imported."""
    program = (
        "import finetooth as ft\n"
        "for name in ('tune', 'Part'):\n"
        "    try: getattr(ft, name)\n"
        "    except ft.FinetoothError as error: print(type(error).__name__, error)\n"
    )
    environment = {**os.environ, "KERAS_BACKEND": "numpy"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stderr == "" and done.stdout.count("FinetoothError Keras runs on 'numpy'") == 2
    assert done.stdout.count("Set KERAS_BACKEND to one of tensorflow, jax, torch") == 2
