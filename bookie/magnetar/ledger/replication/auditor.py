"""The auditor: elected by an ephemeral node, it carries out what `core.audit` decides, by passes over all ledgers.

    /auditor     ephemeral: the name of the process that audits
    /audit       msgpack map {"format": 1, "full_check_ms": wall clock of the last full check}

`serve` contends until its session is lost, and audits while it holds the node. An auditor that does not know yet that its
session is lost does no harm: all it writes are requests, which whoever repairs verifies. A record that cannot be decoded is
counted and logged, and costs itself only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import msgpack

from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.metadata.election import elected
from magnetar.metadata.ledgers import StoredLedgers, ledger_path
from magnetar.metadata.paths import AUDITOR_PATH
from magnetar.metadata.store import MetadataStore, Session
from magnetar.proto.errors import (
    AlreadyExists,
    InvalidArgument,
    MagnetarError,
    NotFoundInStore,
    VersionConflict,
)
from magnetar.runtime.clock import Clock
from magnetar.runtime.tasks import begin, end_all

from .cluster_watch import ClusterWatch
from .core.audit import (
    AuditorCore,
    BookiesListed,
    CancelPass,
    CheckRequested,
    Event,
    PassEnded,
    StartPass,
    TimeReached,
    WakeAt,
)
from .core.request import Reason, RepairRequest
from .queue import UnderreplicatedLedgers
from .records import may_name, stored_records
from .settings import RepairSettings

AUDIT_PATH = "/audit"
_FORMAT = 1
_log = logging.getLogger(__name__)
# Looks whether a full check is due.
_POLL_S = 30.0
_MAX_LOGGED = 20


class PassFound(NamedTuple):
    """What a pass has done so far."""

    ledgers: int = 0
    queued: int = 0
    unreadable: int = 0


class LedgerAudit:
    """Passes over the records of all ledgers, which queue those whose copies are missing, must move, or break placement.

    `found` is the one that runs or ran last.
    """

    def __init__(self, ledgers: StoredLedgers, queue: UnderreplicatedLedgers, clock: Clock) -> None:
        self.found = PassFound()
        self._ledgers = ledgers
        self._queue = queue
        self._clock = clock

    async def run(
        self,
        replaced: Mapping[str, Reason],
        *,
        registered: Callable[[], Mapping[str, None]] | None = None,
        violates: Callable[[LedgerMetadata], bool] = lambda _: False,
    ) -> PassFound:
        """Queues the ledgers that name one of the bookies `replaced`, for the reason given.

        With `registered`, in a full check, also those that name a bookie that is not, and those that break placement
        (`violates`). Raises what the store raises: the pass is to be repeated then, and queues nothing twice.
        """
        self.found = PassFound()
        names = tuple(bookie.encode() for bookie in replaced)
        async for group in stored_records(self._ledgers):
            for ledger_id, node in group:
                if registered is None and not may_name(node, names):
                    continue
                try:
                    metadata = LedgerMetadata.decode(node.value, ledger_id)
                except MagnetarError as error:
                    self._unreadable(ledger_id, error)
                    continue
                there = None if registered is None else registered()
                request = request_for(metadata, replaced, there, there is not None and violates(metadata))
                if request is not None:
                    await self._add(ledger_id, request)
            self.found = self.found._replace(ledgers=self.found.ledgers + len(group))
        return self.found

    async def _add(self, ledger_id: int, request: RepairRequest) -> None:
        try:
            queued = await self._queue.add(ledger_id, replace(request, since_ms=self._clock.now_ms()))
        except InvalidArgument as error:  # its node of the queue: other ledgers go on
            self._unreadable(ledger_id, error)
        else:
            self.found = self.found._replace(queued=self.found.queued + queued)

    def _unreadable(self, ledger_id: int, error: MagnetarError) -> None:
        if self.found.unreadable < _MAX_LOGGED:
            _log.error("%s: the ledger cannot be audited: %s", ledger_path(ledger_id), error)
        self.found = self.found._replace(unreadable=self.found.unreadable + 1)


def request_for(
    metadata: LedgerMetadata,
    replaced: Mapping[str, Reason],
    registered: Mapping[str, None] | None,
    violates: bool,
) -> RepairRequest | None:
    """What has to be asked for this ledger; None: nothing. `registered`: of a full check."""
    bookies: dict[str, Reason] = {}
    fragments = metadata.fragments()
    if registered is not None:
        # A writer replaces a bookie that fails from LAC+1 on: up to there it may lack entries that Qa others have.
        for fragment, following in itertools.pairwise(fragments):
            for bookie in fragment.bookies:
                if bookie not in following.bookies and bookie in registered:
                    bookies[bookie] = Reason.CHECK
    for fragment in fragments:
        for bookie in fragment.bookies:
            reason = replaced.get(bookie)
            if reason is None and registered is not None and bookie not in registered:
                reason = Reason.LOST
            # A fragment without entries lacks nothing; only a drained bookie must leave it.
            if reason is not None and not (fragment.empty and reason is not Reason.DRAINING):
                bookies[bookie] = reason
    return RepairRequest(bookies, violates) if bookies or violates else None


class Auditor:
    """One contender. `serve` it under a session; cancelled, it ends its pass at once."""

    def __init__(
        self,
        store: MetadataStore,
        audit: LedgerAudit,
        watch: ClusterWatch,
        settings: RepairSettings,
        clock: Clock,
        owner: str,
        violates: Callable[[LedgerMetadata], bool],
        queued: Callable[[], None],
    ) -> None:
        """`violates`: whether a ledger breaks placement and could comply; `queued` is called after each pass."""
        self.elected = False
        self.passes = 0
        self._store = store
        self._audit = audit
        self._watch = watch
        self._settings = settings
        self._clock = clock
        self._owner = owner
        self._violates = violates
        self._queued = queued
        self._core = AuditorCore(settings.lost_bookie_delay_s)
        self._pass: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failed: asyncio.Future[None] | None = None

    @property
    def found(self) -> PassFound:
        """The pass that runs or ran last."""
        return self._audit.found

    async def serve(self, session: Session) -> None:
        """Contends and audits until it is cancelled, which its owner does when the session is lost."""
        while True:
            await elected(self._store, AUDITOR_PATH, self._owner.encode(), session)
            self.elected = True
            _log.info("this process audits the ledgers (%s)", self._owner)
            try:
                await self._audit_ledgers()
            finally:
                self.elected = False

    async def _audit_ledgers(self) -> None:
        loop = asyncio.get_running_loop()
        self._core = AuditorCore(self._settings.lost_bookie_delay_s)
        self._failed = loop.create_future()
        self._watch.on_change.append(self._bookies_changed)
        try:
            await self._watch.read()
            self._bookies_changed()
            while True:
                if await self._full_check_is_due():
                    self._handle(CheckRequested())
                done, _ = await asyncio.wait([self._failed], timeout=_POLL_S)
                if done:
                    self._failed.result()
        finally:
            self._watch.on_change.remove(self._bookies_changed)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            await self._end_pass()

    def _bookies_changed(self) -> None:
        view = self._watch.view
        self._handle(BookiesListed(tuple(view.registered), self._watch.known, tuple(view.draining)))

    def _handle(self, event: Event) -> None:
        loop = asyncio.get_running_loop()
        for instruction in self._core.handle(event, loop.time()):
            match instruction:
                case StartPass():
                    self._pass = begin(self._run_pass(instruction), "audit of ledgers", self._pass_ended)
                case CancelPass():
                    assert self._pass is not None
                    self._pass.cancel()
                    self._pass = None
                case WakeAt(at):
                    if self._timer is not None:
                        self._timer.cancel()
                    self._timer = None if at is None else loop.call_at(at, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._handle(TimeReached())

    async def _run_pass(self, wanted: StartPass) -> None:
        if wanted.lost:
            _log.warning("bookies are lost: %s; their ledgers are queued for repair", ", ".join(wanted.lost))
        if wanted.draining:
            _log.info("bookies are drained: %s; their ledgers are queued", ", ".join(wanted.draining))
        replaced = dict.fromkeys(wanted.draining, Reason.DRAINING)
        replaced.update((bookie, Reason.LOST) for bookie in wanted.lost)
        begun_ms = self._clock.now_ms()
        if wanted.full:
            replaced.update(
                (bookie, Reason.DRAINING) for bookie in self._watch.view.draining if bookie not in replaced
            )
            # A bookie that is missing since a moment ago has its delay.
            waiting = dict.fromkeys(wanted.waiting)
            found = await self._audit.run(
                replaced,
                registered=lambda: {**self._watch.view.registered, **waiting},
                violates=self._violates,
            )
            await self._write_full_check(begun_ms)
        else:
            found = await self._audit.run(replaced)
        self.passes += 1
        _log.info("audited %d ledgers, %d were queued for repair, %d cannot be read", *found)

    def _pass_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task is not self._pass:
            return
        self._pass = None
        error = task.exception()
        if error is not None and not isinstance(error, MagnetarError):
            if self._failed is not None and not self._failed.done():
                self._failed.set_exception(error)  # a bug
            return
        if error is not None:
            _log.warning("an audit of the ledgers is repeated: %s", error)
        self._handle(PassEnded(error is None))
        self._queued()

    async def _end_pass(self) -> None:
        task, self._pass = self._pass, None
        if task is not None:
            await end_all([task])

    async def _full_check_is_due(self) -> bool:
        try:
            node = await self._store.get(AUDIT_PATH)
        except MagnetarError as error:
            if not error.retryable:
                raise
            return False
        if node is None:
            # The first auditor: nothing has had time to be lost.
            await self._write_full_check(self._clock.now_ms())
            return False
        try:
            last_ms = int(msgpack.unpackb(node.value)["full_check_ms"])
        except (ValueError, KeyError, TypeError, msgpack.UnpackException):
            return True
        ago_ms = self._clock.now_ms() - last_ms
        return (
            ago_ms >= self._settings.full_check_interval_s * 1000
            or ago_ms < -self._settings.full_check_interval_s * 1000
        )

    async def _write_full_check(self, at_ms: int) -> None:
        value: bytes = msgpack.packb({"format": _FORMAT, "full_check_ms": at_ms})
        node = await self._store.get(AUDIT_PATH)
        with contextlib.suppress(
            VersionConflict, AlreadyExists, NotFoundInStore
        ):  # by the auditor before or after this one
            if node is None:
                await self._store.create(AUDIT_PATH, value)
            else:
                await self._store.put(AUDIT_PATH, value, version=node.version)

    def figures(self) -> dict[str, int]:
        """For /metrics: always the same names."""
        return {
            **(self._core if self.elected else AuditorCore(0.0)).figures(),
            "auditor_elected": int(self.elected),
            "audit_passes_total": self.passes,
            "audit_ledgers": self.found.ledgers,
            "audit_unreadable_ledgers": self.found.unreadable,
        }
