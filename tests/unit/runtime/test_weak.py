"""Callbacks that keep nobody alive."""

import gc
import weakref

from magnetar.runtime.weak import weak_callback


class Owner:
    def __init__(self) -> None:
        self.heard: list[int] = []
        self.callback = weak_callback(self.hear)

    def hear(self, number: int) -> int:
        self.heard.append(number)
        return len(self.heard)


def test_it_calls_its_owner_and_does_not_keep_it() -> None:
    owner = Owner()
    callback, there = owner.callback, weakref.ref(owner)
    assert [callback(7), callback(8)] == [1, 2]
    assert owner.heard == [7, 8]
    gc.disable()
    try:
        del owner
        assert there() is None
    finally:
        gc.enable()
    assert callback(9) is None
