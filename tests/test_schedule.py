"""Schedules: which steps they mean, against plain Python, as numbers and as tensors."""

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

import finetooth as ft


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 5), length=st.none() | st.integers(1, 9), every=st.integers(1, 4))
def test_a_schedule_means_a_range(start, length, every):
    end = None if length is None else start + length
    schedule = ft.Schedule(start, end, every)
    meant = [step for step in range(20) if schedule(ops.convert_to_tensor(step))]
    assert meant == list(range(start, 20 if end is None else end, every))


@pytest.mark.parametrize("warmup", [1, 2, 7, 40])
def test_over_the_warm_up_steps_become_evenly_more_frequent(warmup):
    schedule = ft.Schedule(start=3, warmup=warmup)
    meant = [bool(schedule(step)) for step in range(3 + 2 * warmup)]
    assert not any(meant[:3]) and all(meant[3 + warmup :])
    for t in range(warmup + 1):  # as many by then as the chances add up to
        assert abs(sum(meant[3 : 3 + t]) - t * t / (2 * warmup)) <= 1


def test_a_schedule_is_saved_with_what_it_belongs_to():
    schedule = ft.Schedule(start=2, end=9, every=2, warmup=3)
    saved = keras.saving.serialize_keras_object(schedule)
    assert keras.saving.deserialize_keras_object(saved) == schedule


@pytest.mark.parametrize(
    "wrong", [{"start": -1}, {"every": 0}, {"warmup": 1.5}, {"start": 4, "end": 4}, {"start": True}, {"end": "9"}]
)
def test_bad_schedules_are_refused(wrong):
    with pytest.raises(ft.TuningError, match=next(reversed(wrong))):
        ft.Schedule(**wrong)
