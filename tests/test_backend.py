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
