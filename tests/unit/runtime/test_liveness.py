"""Keep-alive decisions, tick by tick."""

import pytest

from magnetar.runtime.connection.liveness import MIN_PROGRESS_BYTES, Liveness, Observed, Verdict

FINE, PING, SILENT, STALLED = Verdict.FINE, Verdict.PING, Verdict.SILENT, Verdict.STALLED


@pytest.mark.parametrize(
    ("ticks", "verdicts"),
    [
        # (time, reads, runs, unfinished bytes, paused)
        ([(30, 1, 1, 0, False), (60, 2, 2, 0, False)], [FINE, FINE]),
        ([(30, 0, 0, 0, False), (60, 0, 0, 0, False)], [PING, SILENT]),
        ([(30, 0, 0, 0, False), (60, 1, 1, 0, False), (90, 1, 1, 0, False)], [PING, FINE, PING]),
        # Nothing can be heard while reading is paused, nor just after.
        ([(30, 0, 0, 0, True), (60, 0, 0, 0, True), (90, 0, 0, 0, False), (120, 0, 0, 0, False)], [PING] * 4),
        # The loop stood still: what came meanwhile is not read yet.
        ([(30, 0, 0, 0, False), (200, 0, 0, 0, False), (230, 0, 0, 0, False)], [PING, PING, SILENT]),
        # A frame that trickles in, begun just before the first tick, has two whole intervals.
        (
            [(30, 1, 0, 5, False), (60, 2, 0, 9, False), (90, 3, 0, 12, False)],
            [FINE, FINE, STALLED],
        ),
        # A large frame over a slow line makes progress.
        (
            [(30 * n, n, 0, n * MIN_PROGRESS_BYTES, False) for n in range(1, 6)],
            [FINE] * 5,
        ),
        # Whole frames come, and each tick happens to see one unfinished.
        ([(30 * n, n, n, 7, False) for n in range(1, 6)], [FINE] * 5),
    ],
)
def test_verdicts(ticks: list[tuple[float, int, int, int, bool]], verdicts: list[Verdict]) -> None:
    liveness = Liveness(30, 0, Observed(0, 0, 0, False))
    assert [liveness.tick(tick[0], Observed(*tick[1:])) for tick in ticks] == verdicts
