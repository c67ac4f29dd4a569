"""AutoRecovery: the auditor and the workers of one process, under one metadata session.

    start ──> session opened ──> contends for the auditor's office, repairs ledgers ──session lost──> all of it stops
                  ^                                                                                       │
                  └───────────────────────────────────────────────────────────────────────────────────────┘

Whoever starts it owns the store, the transport and the directory of bookies, and closes them after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Coroutine
from typing import Any

from magnetar.ledger.client import LedgerClient
from magnetar.ledger.directory import BookieDirectory
from magnetar.ledger.settings import LedgerSettings
from magnetar.ledger.transport import BookieTransport
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.metadata.store import MetadataStore, Session
from magnetar.metadata.timed import TimedStore
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.clock import Clock
from magnetar.runtime.tasks import LongTask, awaited, end_all

from .auditor import Auditor, LedgerAudit, PassFound
from .cluster_watch import ClusterWatch, PlacedBookies
from .copying import EntryCopier, Throttle
from .core.request import Reason
from .queue import UnderreplicatedLedgers, WorkList
from .settings import RepairSettings
from .worker import Worker

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_MAX_REPORTS = 1000


class AutoRecovery:
    """See the module. `start` it in the loop; `close` may be called at any time, and again."""

    def __init__(
        self,
        store: MetadataStore,
        transport: BookieTransport,
        bookies: BookieDirectory,
        ledger_settings: LedgerSettings,
        settings: RepairSettings,
        rng: random.Random,
        clock: Clock,
        *,
        owner: str,
    ) -> None:
        """`owner` names this process in locks and notes. `ledger_settings`: timeouts, and the placement of all ledgers."""
        self._store = store = TimedStore(store, ledger_settings.metadata_timeout_s)
        ledgers = StoredLedgers(store)
        self._settings = settings
        self._clock = clock
        self._watch = ClusterWatch(store)
        self._client = LedgerClient(
            ledgers,
            transport,
            PlacedBookies(bookies, self._watch),
            ledger_settings,
            rng,
            clock,
        )
        c = self._client.components
        queue = UnderreplicatedLedgers(store)
        self._throttle = Throttle(settings.copy_bytes_per_s)
        self._copier = EntryCopier(c, self._throttle, settings.copy_bytes_in_flight, self._damage_found)
        self._work = WorkList(store, queue, rng, settings.retry_backoff_s, settings.retry_backoff_max_s)
        self._wake = asyncio.Event()
        self._worker = Worker(
            self._client, store, queue, self._work, self._watch, self._copier, settings, owner
        )
        self._auditor = Auditor(
            store,
            LedgerAudit(ledgers, queue, clock),
            self._watch,
            settings,
            clock,
            owner,
            c.chooser.breaks_placement,
            self._wake.set,
        )
        self._task: LongTask | None = None
        self._reports: asyncio.Queue[tuple[str, int, int, int, str]] = asyncio.Queue(_MAX_REPORTS)
        self._sessions_lost = 0
        self._session: Session | None = None  # the one under which it works
        self._closed = False

    async def start(self) -> None:
        """Reads which bookies there are, and goes to work. Raises what the store raises; nothing runs then."""
        await self._watch.start()
        self._watch.on_change.append(self._wake_workers)
        self._task = LongTask("the repair of ledgers", self._run)

    async def close(self) -> None:
        """Stops at once: locks are given back, copies under way are abandoned."""
        if self._closed:
            return
        self._closed = True
        if self._task is not None:
            await self._task.close()
        await self._watch.close()
        await self._client.close()

    @property
    def has_session(self) -> bool:
        """False: nothing is repaired until there is one again. Decided by the clock."""
        return self._session is not None and not self._session.lost

    @property
    def trouble(self) -> str:
        """Why it repairs nothing at this moment although it was started; "" otherwise."""
        return self._task.trouble if self._task is not None else ""

    async def recover_bookie(self, bookie: str) -> PassFound:
        """Queues all ledgers of a bookie now, without the delay. One that is registered is asked what it lacks."""
        await self._watch.read()
        reason = Reason.CHECK if bookie in self._watch.view.registered else Reason.LOST
        found = await self._own_audit().run({bookie: reason})
        self._wake_workers()
        return found

    async def full_check(self) -> PassFound:
        """Compares all records with the registered bookies and with placement now, whoever is the auditor."""
        await self._watch.read()
        view = self._watch.view
        found = await self._own_audit().run(
            dict.fromkeys(view.draining, Reason.DRAINING),
            registered=lambda: self._watch.view.registered,
            violates=self._client.components.chooser.breaks_placement,
        )
        self._wake_workers()
        return found

    def figures(self) -> dict[str, int]:
        """For /metrics."""
        return {
            "underreplicated_ledgers": self._work.queued_ledgers,
            "damage_reports": self._work.damaged_ledgers,
            "repairs_running": len(self._worker.repairing),
            "postponed_ledgers": self._work.postponed,
            **self._worker.figures,
            "repair_copied_entries_total": self._copier.copied_entries,
            "repair_copied_bytes_total": self._throttle.copied_bytes,
            "repair_sessions_lost_total": self._sessions_lost,
            "repair_restarts_total": self._task.failures if self._task is not None else 0,
            **self._auditor.figures(),
        }

    # --- inside ------------------------------------------------------------------------------------------------------

    def _own_audit(self) -> LedgerAudit:
        return LedgerAudit(StoredLedgers(self._store), UnderreplicatedLedgers(self._store), self._clock)

    def _wake_workers(self) -> None:
        self._work.forget_postponed()
        self._wake.set()

    def _damage_found(self, bookie: str, ledger_id: int, first: int, last: int, reason: str) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # then the next reader or scrub finds it
            self._reports.put_nowait((bookie, ledger_id, first, last, reason))

    async def _run(self) -> None:
        while True:
            try:
                await self._serve(await self._store.open_session(self._settings.session_timeout_s))
            except MagnetarError as error:
                if not error.retryable:
                    raise
                _log.warning("repairs begin anew: %s", error)
            await asyncio.sleep(_RETRY_S)

    async def _serve(self, session: Session) -> None:
        """Until the session is lost. Raises what ended one of the parts."""
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[None] = loop.create_future()
        session.when_lost(lambda: None if lost.done() else lost.set_result(None))
        parts: list[Coroutine[Any, Any, None]] = [self._write_reports()]
        if self._settings.auditor:
            parts.append(self._auditor.serve(session))
        if self._settings.workers:
            parts.append(self._repair(session))
        tasks = [awaited(part, "autorecovery") for part in parts]
        self._session = session
        try:
            await asyncio.wait([lost, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                self._sessions_lost += 1
                _log.warning(
                    "the metadata session is lost: all repairs stop, and begin anew under the next one"
                )
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            self._session = None
            await end_all(tasks)
            with contextlib.suppress(MagnetarError):
                await session.close()

    async def _repair(self, session: Session) -> None:
        watch = self._store.watch("/underreplicated", lambda _: self._wake.set())
        running: dict[asyncio.Task[None], None] = {}
        try:
            while True:
                self._wake.clear()
                begun = asyncio.get_running_loop().time()
                async for task in self._work.round():
                    if task.ledger_id in self._worker.repairing:
                        continue  # since an earlier round, which it does not delay
                    running[awaited(self._worker.repair(task, session), f"repair {task}")] = None
                    while len(running) >= self._settings.concurrent_ledgers:
                        await self._some_ended(running)
                await self._wait_for_work(begun, running)
        finally:
            watch.close()
            await end_all(running)

    async def _some_ended(
        self,
        running: dict[asyncio.Task[None], None],
        *others: asyncio.Task[Any],
        timeout_s: float | None = None,
    ) -> bool:
        """Waits for one of these to end, and takes repairs that did out of `running`. False: the timeout was first."""
        done, _ = await asyncio.wait(
            [*running, *others], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in [task for task in running if task in done]:
            del running[task]
            task.result()
        return bool(done)

    async def _wait_for_work(self, begun: float, running: dict[asyncio.Task[None], None]) -> None:
        """Until the next round is due, or something changes. Repairs may go on meanwhile, and afterwards."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.queue_interval_s
        woken = awaited(self._wake.wait(), "work for repairs")
        try:
            while not woken.done():
                wait_s = min(until, self._work.next_due_s(begun)) - loop.time()
                if not await self._some_ended(running, woken, timeout_s=max(wait_s, 0.01)):
                    return
        finally:
            woken.cancel()

    async def _write_reports(self) -> None:
        while True:
            report = await self._reports.get()
            try:
                await self._worker.report_damage(*report)
            except MagnetarError as error:
                _log.warning("damage at bookie %s could not be reported: %s", report[0], error)
