"""Garbage collection against a plain model: whatever is created, deleted, flushed, collected and crashed in whatever order,
what is alive stays readable, what was deleted never comes back, and its space does.

The model is `Promises` (what was acknowledged) and the ledgers that metadata has. The bookie runs on a simulated disk which
loses and tears what was not synced, over an index that loses what was not flushed.

The long form runs 2,000 histories instead of 60.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from magnetar.bookie.entry_log import log_writer
from magnetar.bookie.entry_log.log_writer import LogWriter
from magnetar.bookie.gc.collector import Collector
from magnetar.bookie.gc.compactor import Compactor
from magnetar.proto.errors import MagnetarError, RequestTimeout
from support.long_form import LONG, times
from support.storage_check import KIB, WIDE, Broken, ListedLedgers, Machine, Session

EXAMPLES = times(60, 2000)
SETTINGS = replace(
    WIDE, journal_directories=(), ledger_directories=(), entry_log_bytes=2 * KIB, gc_max_deleted_ratio=1.0
)
# Counted from the newest ledger.
WHICH = st.integers(0, 7)
SIZES = st.sampled_from([50, 400, 1500])
CALLS = st.integers(0, 40)


class Metadata(ListedLedgers):
    """An answer takes a moment, and is of the moment in which it was asked for."""

    async def missing(self, ledger_ids: Sequence[int]) -> list[int]:
        """See ExistingLedgers."""
        listed = self.listed()
        await asyncio.sleep(0.001)
        if self.unreachable:
            raise RequestTimeout("the metadata store does not answer")
        return [ledger_id for ledger_id in ledger_ids if ledger_id not in listed]


class GarbageMachine(RuleBasedStateMachine):
    """Between steps the loop stands still, with whatever is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.machine: Machine
        self.metadata = Metadata()
        self.made = [1]

    @initialize(seed=st.integers(0, 1000))
    def open(self, seed: int) -> None:
        """A new bookie."""
        self.machine = Machine(seed, SETTINGS)
        self.machine.existing = self.metadata
        assert self.machine.open()

    @rule(count=st.integers(1, 4), entries=st.integers(1, 4), size=SIZES, flush=st.booleans())
    def make(self, count: int, entries: int, size: int, flush: bool) -> None:
        """New ledgers, written side by side: first in metadata, then here."""

        async def run(session: Session) -> None:
            answers = self.write_new(session, count, entries, size)
            await asyncio.gather(*answers)
            if flush:
                await session.checkpoint()

        self.step(run)

    def write_new(self, session: Session, count: int, entries: int, size: int) -> list[asyncio.Future[int]]:
        """Adds on their way."""
        new = range(len(self.made) + 1, len(self.made) + 1 + count)
        self.made += new
        return [session.add_soon(ledger, number, size=size) for number in range(entries) for ledger in new]

    @rule(which=WHICH, count=st.integers(1, 4), size=SIZES, wait=st.booleans())
    def write(self, which: int, count: int, size: int, wait: bool) -> None:
        """More entries of a ledger, which may be deleted; the next of them, or the first one again."""

        async def run(session: Session) -> None:
            ledger = self.chosen(which)
            first = (
                max((number for known, number in session.promises.versions if known == ledger), default=-1)
                + 1
            )
            answers = [session.add_soon(ledger, first + n, size=size) for n in range(count)]
            answers.append(session.add_soon(ledger, 0, recovery=True, size=size))
            if wait:
                await asyncio.gather(*answers)

        self.step(run)

    @rule(which=WHICH)
    def fence(self, which: int) -> None:
        """A ledger, or one that was never written here."""

        async def run(session: Session) -> None:
            ledger = self.chosen(which) if which else 900
            if ledger not in session.promises.doomed:
                await session.fence(ledger)

        self.step(run)

    @rule(some=st.sets(WHICH, min_size=1, max_size=5))
    def delete_in_metadata(self, some: set[int]) -> None:
        """Only metadata knows."""

        async def run(session: Session) -> None:
            for which in sorted(some):
                ledger = self.chosen(which)
                session.promises.doomed[ledger] = None
                self.metadata.deleted[ledger] = None

        self.step(run)

    @rule(which=WHICH, wait=st.booleans())
    def delete_by_name(self, which: int, wait: bool) -> None:
        """As a ledger client does, after metadata."""

        async def run(session: Session) -> None:
            ledger = self.chosen(which)
            self.metadata.deleted[ledger] = None
            session.promises.doomed[ledger] = None
            deleting = asyncio.ensure_future(session.delete(ledger))
            if wait:
                await deleting

        self.step(run)

    def chosen(self, which: int) -> int:
        """One of the newest ledgers."""
        return self.made[-1 - which % len(self.made)]

    @rule(unreachable=st.booleans())
    def metadata_fails(self, unreachable: bool) -> None:
        """Until it works again."""
        self.metadata.unreachable = unreachable

    @rule(wait=st.booleans(), calls=st.none() | CALLS)
    def collect(self, wait: bool, calls: int | None) -> None:
        """A round, perhaps its last."""
        if calls is not None:
            self.machine.crash_at(calls)

        async def run(session: Session) -> None:
            collecting = asyncio.ensure_future(self.collected(session))
            if wait:
                await collecting

        self.step(run)

    @rule(delay=st.sampled_from([0.0002, 0.0005, 0.0008, 0.0009, 0.001]))
    def collect_beside_a_flush(self, delay: float) -> None:
        """The flush writes new ledgers, and, side by side with live ones, some that are found to be gone meanwhile."""

        async def run(session: Session) -> None:
            await asyncio.gather(*self.write_new(session, 6, 1, 50))
            await session.checkpoint()
            ledgers = self.made[-6:]
            garbage = [ledger for ledger in ledgers if ledger % 3]
            answers = [
                session.add_soon(ledger, 1 + number, size=450)
                for ledger in ledgers
                for number in range(3 if ledger in garbage else 1)
            ]
            answers += self.write_new(session, 1, 2, 450)
            await asyncio.gather(*answers)
            for ledger in garbage:
                session.promises.doomed[ledger] = None
                self.metadata.deleted[ledger] = None
            collecting = asyncio.ensure_future(self.collected(session))
            await asyncio.sleep(delay)  # metadata answers, or has answered
            await session.checkpoint()
            await collecting
            await session.check_promises()

        self.step(run)

    async def collected(self, session: Session) -> None:
        """What was gone before the round, and known to the index, is deleted after it."""
        promises, failure = session.promises, self.machine.failure
        index = session.bookie.index
        doomed = [
            ledger
            for ledger in promises.doomed
            if ledger in self.metadata.deleted and index.get_ledger(ledger) is not None
        ]
        try:
            result = await session.bookie.collector.collect()
        except MagnetarError:
            return
        if not result.skipped and failure is None and self.machine.failure is None:
            promises.deleted.update(dict.fromkeys(doomed))

    @rule(wait=st.booleans())
    def checkpoint(self, wait: bool) -> None:
        """Beside whatever is on its way."""

        async def run(session: Session) -> None:
            flushing = asyncio.ensure_future(session.checkpoint())
            if wait:
                await flushing

        self.step(run)

    @rule(seconds=st.sampled_from([0.0005, 0.01, 1.0]))
    def wait(self, seconds: float) -> None:
        """What is on its way arrives."""

        async def run(session: Session) -> None:
            await asyncio.sleep(seconds)

        self.step(run)

    @rule(calls=CALLS)
    def a_crash_will_come(self, calls: int) -> None:
        """At a later disk call."""
        self.machine.crash_at(calls)

    @rule(power=st.booleans(), ordered=st.booleans())
    def restart(self, power: bool, ordered: bool) -> None:
        """At this moment, or after an orderly stop."""
        if ordered:
            with contextlib.suppress(MagnetarError):
                self.machine.close_bookie()
        self.machine.kill()
        self.begin(power)

    @rule()
    def check(self) -> None:
        """Everything at once."""
        self.step(Session.check_promises)

    def step(self, script: Callable[[Session], Awaitable[None]]) -> None:
        """A bookie that died in it is started again."""
        assert self.machine.do(script) or not self.machine.alive
        if not self.machine.alive:
            self.machine.kill()
            self.begin(self.machine.starts % 2 == 0)
        elif self.machine.failure is not None:
            raise Broken(f"the bookie failed without a fault: {self.machine.failure}")

    def begin(self, power: bool) -> None:
        """The next process. All promises hold."""
        machine = self.machine
        if power:
            machine.lose_power()
        try:
            assert machine.open()
        except MagnetarError as error:
            raise Broken(f"the bookie does not start: {error}") from error
        assert machine.do(Session.check_promises)
        assert machine.do(Session.promote)

    def teardown(self) -> None:
        """At last everything is deleted, and all space comes back."""
        if not hasattr(self, "machine"):
            return
        try:
            self.machine.kill()
            self.begin(True)
            self.metadata.unreachable = False
            assert self.machine.do(self.everything_goes)
            if self.machine.violations:
                raise self.machine.violations[0]
        finally:
            self.machine.close()

    async def everything_goes(self, session: Session) -> None:
        """Nothing but the current log, with its states, is left."""
        everything = dict.fromkeys([*self.made, 900])
        session.promises.doomed.update(everything)
        self.metadata.deleted.update(everything)
        await session.checkpoint()
        for _ in range(2):
            await self.collected(session)
        left = [info for info in session.bookie.logs.logs() if not info.current]
        if left or self.machine.index.locations:
            self.machine.broken(f"space did not come back: {left}, {self.machine.index.locations}")
        await session.check_promises()


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush goes through several logs, as one of 32 MB does."""
    monkeypatch.setattr(log_writer, "_SLICE_BYTES", 1024)


def run_histories(count: int, *, shrink: bool = True) -> None:
    """The same ones each time in the short form. Raises what a broken promise raises."""
    chosen = settings(
        max_examples=count,
        stateful_step_count=40,
        deadline=None,
        derandomize=not LONG,
        database=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(GarbageMachine, settings=chosen)


@pytest.mark.timeout(3600 if LONG else 120)
def test_what_is_alive_stays_and_what_was_deleted_goes() -> None:
    run_histories(EXAMPLES)


# --- the same histories find each of these ------------------------------------------------------------------------------


def index_told_before_the_copy_is_synced(patch: pytest.MonkeyPatch) -> None:
    """Rule 11."""
    real = LogWriter.sync

    async def sync(self: LogWriter) -> None:
        if self.path.endswith(".compacting"):
            self.synced = self.position
        else:
            await real(self)

    patch.setattr(LogWriter, "sync", sync)


def log_deleted_before_the_index_is_flushed(patch: pytest.MonkeyPatch) -> None:
    """#1534."""

    async def nothing(self: Compactor) -> None:
        return

    patch.setattr(Compactor, "flush_index", nothing)


def metadata_error_taken_for_a_deletion(patch: pytest.MonkeyPatch) -> None:
    """Rule 10."""
    real = Metadata.missing

    async def missing(self: Metadata, ledger_ids: Sequence[int]) -> list[int]:
        try:
            return await real(self, ledger_ids)
        except MagnetarError:
            return list(ledger_ids)

    patch.setattr(Metadata, "missing", missing)


def metadata_read_before_local_ledgers_are_listed(patch: pytest.MonkeyPatch) -> None:
    """Rule 10."""
    real = Collector._delete_missing

    async def delete_missing(self: Collector) -> bool:
        existing: Any = self.existing
        listed = existing.listed()
        await asyncio.sleep(0.005)

        async def missing(ledger_ids: Sequence[int]) -> list[int]:
            return [ledger_id for ledger_id in ledger_ids if ledger_id not in listed]

        with pytest.MonkeyPatch.context() as early:
            early.setattr(existing, "missing", missing, raising=False)
            return await real(self)

    patch.setattr(Collector, "_delete_missing", delete_missing)


def no_barrier_between_flush_and_collection(patch: pytest.MonkeyPatch) -> None:
    """Rule 11."""
    real = Collector.round

    class NoBarrier:
        stopped_by_full_disk = False

        @contextlib.asynccontextmanager
        async def exclusive(self) -> AsyncIterator[None]:
            yield

    async def round(self: Collector, *, forced: bool = False) -> Any:
        self._checkpointer = self.survey._checkpointer = NoBarrier()  # type: ignore[assignment]
        return await real(self, forced=forced)

    patch.setattr(Collector, "round", round)


DEFECTS = [
    index_told_before_the_copy_is_synced,
    log_deleted_before_the_index_is_flushed,
    metadata_error_taken_for_a_deletion,
    # Hundreds of histories until one meets these: for the long form.
    metadata_read_before_local_ledgers_are_listed,
    no_barrier_between_flush_and_collection,
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("defect", DEFECTS if LONG else DEFECTS[:3], ids=lambda defect: defect.__name__)
def test_teeth(defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the histories would prove nothing."""
    defect(monkeypatch)
    with pytest.raises((Broken, AssertionError)):
        run_histories(5 * EXAMPLES, shrink=False)
