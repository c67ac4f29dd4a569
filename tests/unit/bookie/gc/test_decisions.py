"""Which logs a round deletes and compacts, and in which order."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from magnetar.bookie import BookieSettings
from magnetar.bookie.entry_log.records import LOG_LEDGERS
from magnetar.bookie.gc.decisions import (
    MAX_SOURCES,
    History,
    LogUsage,
    Plan,
    fits,
    plan_round,
)

MIB = 1 << 20
RULES = BookieSettings("data")
HOUR, DAY = 3600.0, 86400.0
LOGS = [
    LogUsage(1, 0, 1000 * MIB, 900 * MIB),
    LogUsage(2, 0, 1000 * MIB, 0),
    LogUsage(3, 0, 1000 * MIB, 300 * MIB),
    LogUsage(4, 0, 1000 * MIB, 100 * MIB),
]


def compacted(plan: Plan) -> list[tuple[int, ...]]:
    return [tuple(log.log_id for log in batch.sources) for batch in plan.compact]


def test_every_round_deletes_logs_without_a_live_ledger_whatever_else_is_due() -> None:
    plan = plan_round(LOGS, RULES, History(0.0, 0.0), 1.0)
    assert [log.log_id for log in plan.delete] == [2]
    assert (plan.compact, plan.minor, plan.major) == ((), False, False)


def test_a_minor_compaction_takes_what_is_mostly_garbage_each_hour() -> None:
    assert compacted(plan_round(LOGS, RULES, History(0.0, 0.0), HOUR - 1)) == []
    plan = plan_round(LOGS, RULES, History(0.0, 0.0), HOUR)
    assert compacted(plan) == [(4,)]
    assert (plan.minor, plan.major) == (True, False)


def test_a_major_compaction_takes_what_is_half_garbage_each_day_emptiest_first() -> None:
    plan = plan_round(LOGS, RULES, History(0.0, 0.0), DAY)
    assert compacted(plan) == [(4, 3)]
    assert (plan.minor, plan.major) == (True, True)
    assert plan.compact[0].live_bytes == 400 * MIB


def test_both_are_due_when_none_was_made_since_the_start() -> None:
    assert compacted(plan_round(LOGS, RULES, History(), 0.0)) == [(4, 3)]


def test_a_forced_round_does_not_wait_for_its_time() -> None:
    assert compacted(plan_round(LOGS, RULES, History(5.0, 5.0), 6.0, forced=True)) == [(4, 3)]


def test_a_threshold_or_an_interval_of_zero_turns_a_compaction_off() -> None:
    for rules in (
        replace(RULES, major_compaction_threshold=0.0),
        replace(RULES, major_compaction_interval_s=0.0),
    ):
        plan = plan_round(LOGS, rules, History(), 0.0)
        assert compacted(plan) == [(4,)]
        assert not plan.major
    off = replace(RULES, major_compaction_threshold=0.0, minor_compaction_threshold=0.0)
    assert compacted(plan_round(LOGS, off, History(), 0.0, forced=True)) == []


def test_a_forced_round_minds_thresholds_but_not_intervals() -> None:
    rules = replace(RULES, minor_compaction_interval_s=0.0, major_compaction_interval_s=0.0)
    assert compacted(plan_round(LOGS, rules, History(), 0.0, forced=True)) == [(4, 3)]
    assert compacted(plan_round(LOGS, rules, History(), 0.0)) == []


def test_space_pressure_compacts_ahead_of_schedule_in_that_directory_only() -> None:
    logs = [*LOGS, LogUsage(9, 1, 1000 * MIB, 100 * MIB)]
    plan = plan_round(logs, RULES, History(0.0, 0.0), 1.0, pressed=frozenset([0]))
    assert compacted(plan) == [(4, 3)]
    assert (plan.minor, plan.major) == (False, False)


def test_directories_are_not_mixed_and_a_copy_stays_below_the_size_of_a_log() -> None:
    logs = [LogUsage(number, number % 2, 1000 * MIB, 400 * MIB) for number in range(6)]
    plan = plan_round(logs, RULES, History(), 0.0)
    assert sorted(compacted(plan)) == [(0, 2), (1, 3), (4,), (5,)]
    many = [LogUsage(number, 0, 1000, 1) for number in range(MAX_SOURCES + 1)]
    assert [len(ids) for ids in compacted(plan_round(many, RULES, History(), 0.0))] == [MAX_SOURCES, 1]


def test_a_log_with_damage_is_never_deleted_by_its_statistics_alone() -> None:
    plan = plan_round([LogUsage(1, 0, 1000, 0, whole=False)], RULES, History(), 0.0)
    assert (plan.delete, compacted(plan)) == ((), [(1,)])


def test_a_copy_that_would_not_fit_beside_the_reserve_is_not_begun() -> None:
    [batch] = plan_round(LOGS, RULES, History(0.0, 0.0), HOUR).compact
    assert fits(batch, 500 * MIB, 300 * MIB)
    assert not fits(batch, 400 * MIB, 300 * MIB)


def test_a_copy_has_no_more_ledgers_than_a_log_may_have() -> None:
    logs = [LogUsage(n, 0, 1000, 1, live_ledgers=LOG_LEDGERS // 2) for n in range(1, 6)]
    assert compacted(plan_round(logs, RULES, History(), 0.0)) == [(1, 2), (3, 4), (5,)]


@given(
    logs=st.lists(
        st.builds(
            lambda number, directory, size, part, whole: (directory, size, int(size * part), whole),
            st.integers(0, 1),
            st.integers(0, 2),
            st.integers(0, 10_000),
            st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0]),
            st.booleans(),
        ),
        max_size=30,
    ),
    now=st.sampled_from([0.0, HOUR, DAY]),
    forced=st.booleans(),
    pressed=st.frozensets(st.integers(0, 2)),
)
def test_no_plan_touches_a_log_twice_nor_deletes_one_with_something_alive(
    logs: list[tuple[int, int, int, bool]], now: float, forced: bool, pressed: frozenset[int]
) -> None:
    usages = [LogUsage(number, *log) for number, log in enumerate(logs)]
    plan = plan_round(usages, RULES, History(0.0, 0.0), now, forced=forced, pressed=pressed)
    assert all(log.live_bytes == 0 and log.whole for log in plan.delete)
    taken = [log.log_id for log in plan.delete] + [
        log.log_id for batch in plan.compact for log in batch.sources
    ]
    assert len(taken) == len(dict.fromkeys(taken))
    for batch in plan.compact:
        assert 1 <= len(batch.sources) <= MAX_SOURCES
        assert all(log.directory == batch.directory for log in batch.sources)
        assert all(log.live_ratio < RULES.major_compaction_threshold for log in batch.sources)
    assert not math.isnan(sum(batch.live_bytes for batch in plan.compact))
