"""Telling libraries a lane's SMs."""

from smpart.runtime.device.carveout import Carveout


def test_only_a_change_is_told_and_nothing_left_alone_is_none():
    told = []
    carveout = Carveout(told.append)
    for units in (0, 36, 36, 0, 0, 68):
        carveout.leave(units)
    assert told == [None, 36, None, 68]


def test_without_the_knob_it_is_said_once(caplog):
    caplog.set_level("INFO", logger="smpart")
    carveout = Carveout(None)
    carveout.leave(36)
    assert caplog.text.count("cannot be told") == 1


def test_this_torch_has_it():
    assert Carveout.of_torch()._set is not None
