"""What every test shares."""

import os

import keras
import numpy as np
import pytest


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
