"""What others use of the machine."""

import os
import time

import pytest
from bench.probes import calibration
from bench.probes.calibration import Others


@pytest.mark.parametrize(
    ("idle", "ours", "share"),
    [
        (200, 0.0, 0.0),  # of 200 jiffies in one second of two cores
        (0, 2.0, 0.0),
        (0, 0.0, 1.0),
        (100, 0.5, 0.25),  # half is busy, a quarter is ours
        (100, 1.5, 0.0),  # two clocks are never quite the same
    ],
)
def test_others_are_what_is_busy_and_not_ours(
    monkeypatch: pytest.MonkeyPatch, idle: int, ours: float, share: float
) -> None:
    monkeypatch.setattr(calibration, "_jiffies", iter([(5000, 9000), (5000 + idle, 9200)]).__next__)
    monkeypatch.setattr(calibration, "_our_cpu_s", iter([7.0, 7.0 + ours]).__next__)
    monkeypatch.setattr(time, "perf_counter", iter([100.0, 101.0]).__next__)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert Others().share() == pytest.approx(share)


def test_no_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_jiffies", lambda: (5000, 9000))
    assert Others().share() == 0.0
