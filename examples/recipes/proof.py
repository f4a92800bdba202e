"""How the recipes prove what they say. A proof that fails ends the program with an error."""

import keras
import numpy as np


def numbers(value):
    """A copy of a tensor's or variable's values."""
    return np.array(keras.ops.convert_to_numpy(keras.ops.stop_gradient(keras.ops.convert_to_tensor(value))))


def unchanged(before, after, inside):
    """Outside the mask every bit is as it was; inside, something has changed."""
    before, after = numbers(before), numbers(after)
    changed = before.view("uint32") != after.view("uint32")
    outside = int((changed & ~inside).sum())
    print(f"outside: {outside} of {int((~inside).sum())} elements changed, inside: {int((changed & inside).sum())}")
    if outside or not (changed & inside).any():
        raise SystemExit("Not what was promised.")


def equal(what, found, expected, tolerance=1e-5):
    """Two results agree."""
    difference = float(np.abs(numbers(found) - np.asarray(expected)).max())
    print(f"{what}: differs from the reference by at most {difference:.1e}")
    if not difference <= tolerance:
        raise SystemExit("Not what was promised.")
