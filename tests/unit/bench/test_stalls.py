"""What a service adds to a disk that stalls."""

import pytest
from bench.stalls import MARGIN_S, WINDOW_S, coinciding, describe, outside, probing, rows, stalls

QUICK_S = 0.001


def every(
    interval_s: float, first: float, last: float, slow: dict[float, float]
) -> list[tuple[float, float]]:
    """Samples of 1 ms, but for those within a stall of `slow` (when it began: seconds), which wait for its end."""
    found = []
    for number in range(round((last - first) / interval_s)):
        at = first + number * interval_s
        waits = [began + long - at for began, long in slow.items() if began <= at < began + long]
        found.append((at, max([QUICK_S, *waits])))
    return found


def in_window(number: int, offset: float = 0.2) -> float:
    """A moment in the window of this number; even ones are the probe's."""
    return number * WINDOW_S + offset


def test_every_other_window_is_the_probes() -> None:
    assert [probing(in_window(number)) for number in range(4)] == [True, False, True, False]


def test_waits_that_overlap_are_one_stall() -> None:
    samples = [(2.0, 0.030), (1.02, 0.025), (1.00, 0.001), (1.01, 0.050)]
    assert [began for began, _ in stalls(samples)] == [1.01, 2.0]
    assert [ended for _, ended in stalls(samples)] == pytest.approx([1.06, 2.03])
    assert len(stalls(samples, 0.045)) == 1
    assert stalls([]) == []


def test_samples_near_a_stall_are_left_out_before_and_after_it() -> None:
    margin = MARGIN_S
    samples = [(at, QUICK_S) for at in (1.0 - 1.5 * margin, 1.0 - 0.5 * margin, 1.1, 1.2 + 1.5 * margin)]
    assert outside(samples, [(1.0, 1.2)]) == [samples[0], samples[3]]


def test_stalls_coincide_when_they_are_near_each_other() -> None:
    assert coinciding([(1.0, 1.1), (5.0, 5.1)], [(1.15, 1.3), (9.0, 9.1)]) == 1
    assert coinciding([(1.0, 1.1)], []) == 0


def test_a_stall_of_the_disk_is_not_the_services() -> None:
    stall = {in_window(2): 0.15, in_window(5): 0.15}  # the second while the probe pauses
    service = every(0.0001, 0.0, 4.0, stall)
    probe = [sample for sample in every(0.0013, -1.0, 5.0, stall) if probing(sample[0])]
    found = describe(service, every(0.0013, -9.0, -5.0, {}), probe)
    assert (
        found["service"]["stalls"]
        == found["service beside"]["stalls"]
        == found["probe beside"]["stalls"]
        == 1
    )
    assert found["service beside"]["p99"] > 20
    assert found["coinciding"] == {"stalls": 1}
    assert (
        found["service steady"]["stalls"] == found["probe steady"]["stalls"] == found["alone"]["stalls"] == 0
    )
    assert found["service steady"]["maximum"] == pytest.approx(1.0)
    assert found["added"]["p999"] == pytest.approx(0.0)


def test_a_stall_of_the_service_alone_stays_in() -> None:
    service = every(0.0001, 0.0, 4.0, {in_window(2): 0.15})
    probe = [sample for sample in every(0.0013, 0.0, 4.0, {}) if probing(sample[0])]
    found = describe(service, probe, probe)
    assert found["coinciding"] == {"stalls": 0}
    assert found["service steady"]["stalls"] == 1
    assert found["added"]["p99"] > 20


def test_what_the_probe_did_before_and_after_is_left_out() -> None:
    probe = every(0.0013, 0.0, 0.4, {})
    found = describe([(0.1, QUICK_S), (0.3, QUICK_S)], probe, [*probe, (0.35, 1.0), (-3.0, 1.0)])
    assert found["probe beside"]["stalls"] == 0


def test_a_disk_that_stalls_all_the_time_leaves_nothing_to_subtract() -> None:
    service = every(0.001, 0.0, 0.4, {})
    found = describe(service, [], [(0.0, 0.4)])
    assert "service steady" not in found
    assert "added" not in found
    assert "alone" not in found


def test_rounds_together_are_medians_of_times_and_sums_of_counts() -> None:
    one, other = ({"service": {"p50": value, "stalls": 1, "samples": 10}} for value in (1.0, 3.0))
    assert rows([one, other, {}]) == {"service": {"p50": 2.0, "stalls": 2, "samples": 20}}
