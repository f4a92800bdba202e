"""What every test shares."""

import os

import keras
import numpy as np
import pytest


def pytest_configure():
    """No backend is tested in the place of another."""
    asked = os.environ.get("FINETOOTH_TEST_BACKEND", keras.backend.backend())
    if asked != keras.backend.backend():
        raise pytest.UsageError(f"{asked} was to be tested, and {keras.backend.backend()} is what runs.")


@pytest.fixture(autouse=True)
def fresh_names_and_seeds():
    """Automatic layer names and random numbers do not depend on which tests ran before."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    yield


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def backend() -> str:
    return os.environ.get("FINETOOTH_TEST_BACKEND", keras.backend.backend())
