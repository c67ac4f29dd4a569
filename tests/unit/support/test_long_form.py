"""LONG=1, LONG=10, LONG=0.1."""

from __future__ import annotations

import pytest

from support import long_form


@pytest.mark.parametrize(("factor", "expected"), [(0, 4), (1, 50), (2, 100), (0.1, 5), (0.001, 1)])
def test_how_often_a_test_does_something(
    monkeypatch: pytest.MonkeyPatch, factor: float, expected: int
) -> None:
    monkeypatch.setattr(long_form, "FACTOR", factor)
    monkeypatch.setattr(long_form, "LONG", factor > 0)
    assert long_form.times(4, 50) == expected
