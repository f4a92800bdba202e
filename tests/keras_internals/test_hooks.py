"""Methods are hooked and set free again, in any order."""

import functools
import inspect
from contextlib import ExitStack
from itertools import permutations

import keras
import numpy as np
import pytest

import finetooth as ft
from finetooth.keras_internals.hooks import hooked


class Owner:
    def greet(self, name, greeting="hello"):
        """Greet."""
        return f"{greeting} {name}"


def saying(word):
    return lambda call, *args, **kwargs: f"{word}({call(*args, **kwargs)})"


def opened(owner, words):
    stacks = {}
    for word in words:
        stacks[word] = ExitStack()
        stacks[word].enter_context(hooked(owner, "greet", saying(word)))
    return stacks


def expected(words):
    text = "hello you"
    for word in words:
        text = f"{word}({text})"
    return text


@pytest.mark.parametrize("order", permutations("abc"), ids="".join)
@pytest.mark.parametrize("set_before", [False, True])
def test_hooks_are_closed_in_any_order(order, set_before):
    owner = Owner()
    if set_before:
        owner.greet = functools.partial(Owner.greet, owner)
    before = dict(owner.__dict__)
    stacks = opened(owner, "abc")
    left = list("abc")
    assert owner.greet("you") == expected(left)
    for word in order:
        stacks[word].close()
        left.remove(word)
        assert owner.greet("you") == expected(left)
    assert owner.__dict__.keys() == before.keys()
    assert all(owner.__dict__[name] is before[name] for name in before)


def test_a_hook_is_opened_while_another_one_lives_and_after_one_has_gone():
    owner = Owner()
    stacks = opened(owner, "ab")
    stacks["a"].close()
    stacks |= opened(owner, "c")
    assert owner.greet("you") == expected("bc")
    stacks["b"].close()
    stacks |= opened(owner, "a")
    assert owner.greet("you") == expected("ca")
    stacks["c"].close()
    stacks["a"].close()
    assert owner.__dict__ == {}


def test_one_function_given_twice_runs_twice_and_goes_once_each():
    owner, twice = Owner(), saying("a")
    first, second = ExitStack(), ExitStack()
    first.enter_context(hooked(owner, "greet", twice))
    second.enter_context(hooked(owner, "greet", twice))
    assert owner.greet("you") == expected("aa")
    first.close()
    assert owner.greet("you") == expected("a")
    second.close()
    assert owner.__dict__ == {}


@pytest.mark.parametrize("where", ["block", "hook", "method"])
def test_an_exception_undoes_the_hook_and_is_not_caught(where):
    def raising(*args):
        raise KeyboardInterrupt

    owner = Owner()
    if where == "method":
        owner.greet = raising
    before = dict(owner.__dict__)
    around = raising if where == "hook" else saying("a")
    with pytest.raises(KeyboardInterrupt), hooked(owner, "greet", around):
        if where == "block":
            raise KeyboardInterrupt
        owner.greet("you")
    assert owner.__dict__ == before


def test_what_does_not_exist_is_not_hooked():
    owner = Owner()
    with pytest.raises(AttributeError), hooked(owner, "leave", saying("a")):
        pass
    assert owner.__dict__ == {}


def test_the_signature_is_kept():
    owner, plain = Owner(), Owner()
    with opened(owner, "a")["a"], opened(owner, "b")["b"]:
        assert inspect.signature(owner.greet) == inspect.signature(plain.greet)
        assert (owner.greet.__name__, owner.greet.__doc__) == ("greet", "Greet.")


def test_a_hook_closed_by_the_call_it_is_in_and_one_opened_there_count_from_the_next_call():
    owner = Owner()
    stacks = opened(owner, "a")

    def around(call, *args):
        stacks.pop("a").close()
        stacks.update(opened(owner, "c"))
        return call(*args)

    with hooked(owner, "greet", around):
        assert owner.greet("you") == expected("a")
    assert owner.greet("you") == expected("c")
    stacks["c"].close()
    assert owner.__dict__ == {}


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("wraps", [False, True])
def test_what_the_user_sets_meanwhile_stays(order, wraps):
    owner = Owner()
    stacks = opened(owner, "a")
    ours = owner.greet

    def theirs(*args):
        return f"u({ours(*args)})"

    if wraps:
        functools.update_wrapper(theirs, ours)  # copies our attributes as well
    owner.greet = theirs
    stacks |= opened(owner, "b")
    left = list("aub")
    for word in order:
        assert owner.greet("you") == expected(left)
        stacks[word].close()
        left.remove(word)
    assert owner.__dict__ == {"greet": theirs} and owner.greet("you") == expected("u")
    owner.greet = ours  # as a user takes back what they have set
    assert owner.greet("you") == expected("")
    with opened(owner, "c")["c"]:
        assert owner.greet("you") == expected("c")
    assert owner.__dict__ == {}


def test_what_the_user_deletes_meanwhile_stays_deleted():
    owner = Owner()
    with opened(owner, "a")["a"]:
        del owner.greet
    assert owner.__dict__ == {}


def plain():
    inputs = keras.Input((4,))
    features = keras.layers.Dense(3, "relu", name="below")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="above")(features))


def begun(model):
    """Begin all that can be on at once; return how each of them is ended."""
    tuning = ft.tune(model, "above/kernel[:, 0]")
    selective = ft.selective_backprop(model, 0.5)
    split = tuning.split()
    on_upper = ft.selective_backprop(split.upper, 0.5)
    return {"tune": tuning.finish, "selective": selective.stop, "upper": on_upper.stop}


X, Y = np.random.default_rng(0).normal(size=(8, 4)), np.random.default_rng(1).normal(size=(8, 2))


@pytest.mark.parametrize("order", permutations(["tune", "selective", "upper"]), ids=" ".join)
def test_tune_and_selective_backprop_end_in_any_order(order, tmp_path):
    model = plain()
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(X, Y, verbose=0)  # sets attributes of Keras' own
    layers = [model, *model.layers]
    before = [set(vars(layer)) for layer in layers]
    ends = begun(model)
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(X, Y, verbose=0)
    for name in order:
        ends[name]()
    assert not [name for layer, names in zip(layers, before) for name in set(vars(layer)) ^ names]
    model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    model.fit(X, Y, epochs=3, verbose=0)
    model.save(tmp_path / "model.keras")
    saved, loaded = model.optimizer, keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert int(saved.iterations) == int(loaded.iterations) == 3
    assert len(saved.variables) == len(loaded.variables) > 2
    for one, other in zip(saved.variables, loaded.variables):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other))
        assert one.path.endswith("bias") or keras.ops.any(one != 0)


@pytest.mark.parametrize("order", [["tune", "selective"], ["selective", "tune"]], ids=" ".join)
def test_what_is_still_on_works_as_before_the_other_ended(order):
    model = plain()
    tuning = ft.tune(model, "above/kernel[:, 0]")
    selective = ft.selective_backprop(model, 0.5)
    ends = {"tune": tuning.finish, "selective": selective.stop}
    ends[order[0]]()
    model.compile("sgd", "mse", run_eagerly=True)
    weights = model.get_weights()
    logs = model.fit(X, Y, verbose=0).history
    assert ("kept_fraction" in logs) == (order[0] == "tune")
    moved = [np.any(a != b) for a, b in zip(weights, model.get_weights())]
    assert moved == ([False, False, True, False] if order[0] == "selective" else [True, True, True, True])
    ends[order[1]]()
