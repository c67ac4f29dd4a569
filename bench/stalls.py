"""What a service adds to a disk that stalls: its latencies beside those of a probe of the same pace in the same seconds.

A disk may hold every write back for 30 to 300 ms, a few times in 20 s, whoever writes. A p99 of the service is then the
disk's. The probe (`bench.probes.paced`) writes as much, as often, into a file of its own: what stalls the disk stalls both.
Time is cut into windows of WINDOW_S, the same in every process, and the probe writes in every other one:

    window      |  0   probe  |  1          |  2   probe  |  3          |
    service     |  beside     |  undisturbed|  beside     |  undisturbed|

* "service" is of the windows without the probe. Compared with "service, beside the probe" it shows what the probe disturbs.
* "bare disk, alone" was measured before the service started. Compared with "bare disk, beside" it shows what the service
  does to the disk. If stalls appear in the latter only, the service causes them, and leaving them out would flatter it.
* "while the disk did not stall" leaves out the moments around each stall of the *probe*, for both. The service's own
  latencies have no say in what is left out, so that a stall of its own stays in.
* What the service adds is the difference of the percentiles of both in those moments. It is not the percentile of a
  difference: no message of the service corresponds to a write of the probe. On a machine that others use as well it is
  mostly the time for which the processes of the service and its client wait for a processor; the probe is only one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from bench.percentiles import percentiles

# When it began by time.perf_counter(), which is the same clock in every process, and the seconds until it was done.
Sample = tuple[float, float]
Interval = tuple[float, float]

WINDOW_S = 0.5
STALL_S = 0.020  # no sync of a working disk takes so long; on two busy cores one takes 4 ms
MARGIN_S = 0.1  # around a stall of the probe: the service's sync before and after it waits as well

CONDITIONS = {
    "alone": "bare disk, alone, before the service",
    "service": "service, without the probe",
    "service beside": "service, beside the probe",
    "probe beside": "bare disk, beside the service",
    "service steady": "service, while the disk did not stall",
    "probe steady": "bare disk, in the same moments",
}


def probing(at: float) -> bool:
    """True if the probe writes in the window of this moment."""
    return int(at / WINDOW_S) % 2 == 0


def stalls(samples: Iterable[Sample], at_least_s: float = STALL_S) -> list[Interval]:
    """When something waited for `at_least_s` or longer, in order. Waits that overlap are one stall.

    stalls([(1.00, 0.001), (1.01, 0.050), (1.02, 0.040), (2.0, 0.030)]) == [(1.01, 1.06), (2.0, 2.03)]
    """
    found: list[Interval] = []
    for began, waited in sorted(sample for sample in samples if sample[1] >= at_least_s):
        if found and began <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], began + waited))
        else:
            found.append((began, began + waited))
    return found


def outside(samples: Iterable[Sample], intervals: Sequence[Interval]) -> list[Sample]:
    """The samples that began farther than MARGIN_S from every interval."""
    return [
        (began, waited)
        for began, waited in samples
        if not any(start - MARGIN_S <= began <= end + MARGIN_S for start, end in intervals)
    ]


def coinciding(ours: Sequence[Interval], theirs: Sequence[Interval]) -> int:
    """How many of ours one of theirs is nearer to than MARGIN_S."""
    return sum(
        any(start - MARGIN_S <= end_of_ours and start_of_ours <= end + MARGIN_S for start, end in theirs)
        for start_of_ours, end_of_ours in ours
    )


def describe(
    service: Sequence[Sample], alone: Sequence[Sample], beside: Sequence[Sample]
) -> dict[str, dict[str, float]]:
    """Percentiles in ms, "samples" and "stalls" by the names of CONDITIONS, "added" (p50, p99, p999), "coinciding" (stalls).

    `service` and `beside` are of the same seconds; what the probe did before the first and after the last message is left
    out. Conditions without samples are absent.
    """
    first, last = service[0][0], max(began for began, _ in service)
    in_windows = [sample for sample in service if probing(sample[0])]
    beside = [sample for sample in beside if first <= sample[0] <= last]
    of_disk = stalls(beside)
    found: dict[str, dict[str, float]] = {}
    for name, samples in (
        ("alone", alone),
        ("service", [sample for sample in service if not probing(sample[0])]),
        ("service beside", in_windows),
        ("probe beside", beside),
        ("service steady", outside(in_windows, of_disk)),
        ("probe steady", outside(beside, of_disk)),
    ):
        if samples:
            found[name] = percentiles(waited for _, waited in samples)._asdict()
            found[name] |= {"samples": len(samples), "stalls": len(stalls(samples))}
    if "service steady" in found and "probe steady" in found:
        ours, bare = found["service steady"], found["probe steady"]
        found["added"] = {name: ours[name] - bare[name] for name in ("p50", "p99", "p999")}
    found["coinciding"] = {"stalls": coinciding(stalls(in_windows), of_disk)}
    return found


def rows(rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What `describe` found in each round, together: medians of percentiles, sums of samples and stalls."""
    names = dict.fromkeys(name for found in rounds for name in found)
    together: dict[str, dict[str, float]] = {}
    for name in names:
        of_rounds = [found[name] for found in rounds if name in found]
        together[name] = {
            key: (sum if key in ("samples", "stalls") else median)(one[key] for one in of_rounds)
            for key in of_rounds[0]
        }
    return together
