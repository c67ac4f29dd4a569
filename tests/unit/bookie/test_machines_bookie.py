"""A whole bookie against a plain model: whatever is asked of it in whatever order, and wherever it dies, promises hold.

Hypothesis chooses the steps and shrinks a failing run to the few that matter; the model is `Promises`, dictionaries of what
was acknowledged. The bookie runs on a simulated disk that loses and tears what was not synced.

The long form runs 2,000 histories instead of 150.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from magnetar.proto.errors import MagnetarError
from support.inline_devices import InlineJournalDevice
from support.long_form import LONG, times
from support.storage_check import SETTINGS, WIDE, Broken, Machine, Session
from support.storage_index import CountedIndex

EXAMPLES = times(150, 2000)
LEDGERS = st.integers(1, 4)
ENTRIES = st.integers(0, 12)
SIZES = st.sampled_from([50, 700, 2000, 5000])
# Disk calls until the crash or the fault; a small workload has a few of them per step.
CALLS = st.integers(0, 30)
# None: as they are.
JOURNALS = [None, None, (), ("/journals/a",), ("/journals/b", "/journals/a"), ("/journals/c", "/journals/a")]


class BookieMachine(RuleBasedStateMachine):
    """One step is what one client does, or a crash. Between steps the loop stands still, with whatever is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.machine: Machine

    @initialize(seed=st.integers(0, 1000), wide=st.booleans())
    def open(self, seed: int, wide: bool) -> None:
        """A new bookie, over one directory of each kind or two."""
        self.machine = Machine(seed, WIDE if wide else SETTINGS)
        assert self.machine.open()

    @rule(ledger=LEDGERS, first=ENTRIES, count=st.integers(1, 6), size=SIZES, wait=st.booleans())
    def add(self, ledger: int, first: int, count: int, size: int, wait: bool) -> None:
        """Entries that were not added before; answered, or on their way when the step ends."""

        async def run(session: Session) -> None:
            known = session.promises.versions
            keys = [(ledger, n) for n in range(first, first + count) if (ledger, n) not in known]
            answers = [session.add_soon(*key, size=size) for key in keys]
            if wait:
                await asyncio.gather(*answers)

        self.step(run)

    @rule(ledger=LEDGERS, entry=ENTRIES, size=SIZES, wait=st.booleans())
    def recovery_add(self, ledger: int, entry: int, size: int, wait: bool) -> None:
        """As a recovery does: new bytes under an old id, or an entry that was never here."""

        async def run(session: Session) -> None:
            answer = session.add_soon(ledger, entry, recovery=True, size=size)
            if wait:
                await answer

        self.step(run)

    @rule(ledger=st.integers(1, 6), wait=st.booleans())
    def fence(self, ledger: int, wait: bool) -> None:
        """5 and 6 are never written here."""
        self.ask(lambda session: session.fence(ledger), wait)

    @rule(ledger=LEDGERS, confirmed=ENTRIES, wait=st.booleans())
    def write_last_confirmed(self, ledger: int, confirmed: int, wait: bool) -> None:
        """Explicit LAC."""
        self.ask(lambda session: session.write_last_confirmed(ledger, confirmed), wait)

    @rule(wait=st.booleans())
    def checkpoint(self, wait: bool) -> None:
        """Beside whatever else is on its way."""
        self.ask(Session.checkpoint, wait)

    @rule(ledger=LEDGERS, wait=st.booleans())
    def delete(self, ledger: int, wait: bool) -> None:
        """By name."""
        self.ask(lambda session: session.delete(ledger), wait)

    @rule(ledger=LEDGERS, unreachable=st.booleans())
    def delete_in_metadata(self, ledger: int, unreachable: bool) -> None:
        """For a later round to find, if metadata can be asked by then (rule 10)."""
        self.machine.existing.unreachable = unreachable

        async def run(session: Session) -> None:
            session.delete_in_metadata(ledger)

        self.step(run)

    @rule(wait=st.booleans())
    def collect_garbage(self, wait: bool) -> None:
        """With a major compaction, beside whatever is on its way."""
        self.ask(Session.collect_garbage, wait)

    @rule(ledger=LEDGERS, first=ENTRIES, last=ENTRIES)
    def read(self, ledger: int, first: int, last: int) -> None:
        """As a sequential reader."""
        self.step(lambda session: session.check_range(ledger, first, last))

    @rule(seconds=st.sampled_from([0.001, 0.1, 2.0]))
    def wait(self, seconds: float) -> None:
        """What is on its way arrives; the periodic tasks do theirs."""

        async def run(session: Session) -> None:
            await asyncio.sleep(seconds)

        self.step(run)

    @rule(calls=CALLS, error=st.sampled_from([0, 0, errno.EIO, errno.ENOSPC]))
    def something_will_happen(self, calls: int, error: int) -> None:
        """A crash, or a failure, at a later disk call."""
        if error:
            self.machine.fail_at(calls, error)
        else:
            self.machine.crash_at(calls)

    @rule(power=st.booleans(), again=st.none() | CALLS, journals=st.sampled_from(JOURNALS))
    def crash(self, power: bool, again: int | None, journals: tuple[str, ...] | None) -> None:
        """At this moment, perhaps again in the recovery; the next start may have other journal directories."""
        self.machine.kill()
        if journals is not None:
            self.machine.settings = replace(self.machine.settings, journal_directories=journals)
        self.restart(power, again)

    @rule(power=st.booleans())
    def stop(self, power: bool) -> None:
        """In order."""
        self.guarded(lambda: self.machine.close_bookie())
        self.machine.kill()
        self.restart(power, None)

    @rule()
    def check(self) -> None:
        """Everything at once."""
        self.step(Session.check_promises)

    def ask(self, request: Callable[[Session], Awaitable[None]], wait: bool) -> None:
        """A request of a client that waits for its answer or goes on."""

        async def run(session: Session) -> None:
            task = asyncio.ensure_future(request(session))
            if wait:
                await task
            else:
                await asyncio.sleep(0)

        self.step(run)

    def step(self, script: Callable[[Session], Awaitable[None]]) -> None:
        """Runs a step; a bookie that is dead or has failed after it is started again."""
        self.guarded(lambda: self.machine.do(script))
        if not self.machine.alive or self.machine.failure is not None:
            self.machine.kill()
            self.restart(self.machine.starts % 2 == 0, None)

    def guarded(self, work: Callable[[], bool]) -> None:
        """A bookie that has failed may refuse anything."""
        try:
            work()
        except MagnetarError as error:
            if self.machine.failure is None and self.machine.faulted is None:
                raise Broken(f"refused without a reason: {error!r}") from error

    def restart(self, power: bool, again: int | None) -> None:
        """The next process, after a power loss or not, which may die over its recovery once. All promises hold."""
        machine = self.machine
        machine.faulted = None
        if power:
            machine.lose_power()
        if again is not None:
            machine.crash_at(again)
            if not self.opened():
                machine.kill()
                machine.lose_power()
            machine.disk.clear_faults()
        if not machine.alive:
            assert self.opened()
        assert machine.do(Session.check_promises)
        assert machine.do(Session.promote)

    def opened(self) -> bool:
        """False if it died over it; a refusal is broken."""
        try:
            return self.machine.open()
        except MagnetarError as error:
            raise Broken(f"the bookie does not start: {error}") from error

    def teardown(self) -> None:
        """What is left on its way ends, and then a power loss."""
        if not hasattr(self, "machine"):
            return
        try:
            self.machine.kill()
            self.restart(True, None)
            if self.machine.violations:
                raise self.machine.violations[0]
        finally:
            self.machine.close()


def run_histories(count: int, *, shrink: bool = True) -> None:
    """The same ones each time in the short form. Raises what a broken promise raises."""
    chosen = settings(
        max_examples=count,
        stateful_step_count=30,
        deadline=None,
        derandomize=not LONG,
        database=None,
        # Explaining a failure traces every line, which takes minutes.
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(BookieMachine, settings=chosen)


@pytest.mark.timeout(3600 if LONG else 120)
def test_a_bookie_keeps_its_promises_whatever_is_asked_and_wherever_it_dies() -> None:
    run_histories(EXAMPLES)


def acknowledged_before_the_sync(patch: pytest.MonkeyPatch) -> None:
    """Rule 4."""
    real = InlineJournalDevice._write

    def write(self: InlineJournalDevice, parts: list[bytes]) -> None:
        sync_data, self._sync_data = self._sync_data, False
        try:
            real(self, parts)
        finally:
            self._sync_data = sync_data

    patch.setattr(InlineJournalDevice, "_write", write)


def index_not_flushed(patch: pytest.MonkeyPatch) -> None:
    """Rule 2."""

    async def nothing(self: CountedIndex) -> None:
        return

    patch.setattr(CountedIndex, "flush_locations", nothing)


@pytest.mark.parametrize(
    "defect", [acknowledged_before_the_sync, index_not_flushed], ids=lambda defect: defect.__name__
)
def test_teeth(defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the histories would prove nothing."""
    defect(monkeypatch)
    with pytest.raises(Broken):
        run_histories(EXAMPLES, shrink=False)
