"""A worker repairs one ledger at a time: the asyncio shell around `core.repair`, and what it does about damage.

    lock ──> request and record are read ──> core decides ──> ... ──> request removed, or its note written ──> unlock

The lock is bound to a session, so it does not outlive the process; it saves work, and nothing depends on it for safety: two
workers of one ledger would write two copies, and the compare-and-set of one of them would fail. A cancelled repair leaves
copies that no record names, which their bookies collect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence

from magnetar.ledger.client import LedgerClient
from magnetar.ledger.components import LedgerComponents
from magnetar.ledger.core.events import (
    BookiesChosen,
    ChooseBookies,
    MetadataFailed,
    MetadataFound,
    ReadMetadata,
    WriteMetadata,
)
from magnetar.metadata.damage import add_ranges, damaged_path, decode_ranges
from magnetar.metadata.store import MetadataStore, Session
from magnetar.proto.errors import (
    DataDirectoryError,
    InvalidArgument,
    LedgerNotFound,
    MagnetarError,
    NotFoundInStore,
    VersionConflict,
)

from .cluster_watch import ClusterWatch
from .copying import EntryCopier, SourceFailed, TargetFailed
from .core.repair import (
    CheckCopies,
    Checked,
    ChooseCompliant,
    Copied,
    CopiesFailed,
    CopyEntries,
    DeleteCopies,
    Event,
    Grace,
    Instruction,
    Postponed,
    RecoverLedger,
    RecoveryFailed,
    RepairCore,
    Repaired,
)
from .core.request import RepairRequest
from .healing import Healed, Healer
from .queue import Task, UnderreplicatedLedgers, WorkList
from .settings import RepairSettings

_log = logging.getLogger(__name__)
# Ledgers whose grace period, and those whose lost entries, are remembered.
_MAX_REMEMBERED = 10_000


class Worker:
    """Repairs what it is given; one for each process, for any number of repairs at a time."""

    def __init__(
        self,
        client: LedgerClient,
        store: MetadataStore,
        queue: UnderreplicatedLedgers,
        work: WorkList,
        watch: ClusterWatch,
        copier: EntryCopier,
        settings: RepairSettings,
        owner: str,
    ) -> None:
        # For /metrics, of all repairs of the process. Lost entries are those of which every copy is bad, as found by it.
        self.figures = dict.fromkeys(
            (
                "repaired_ledgers_total",
                "replaced_bookies_total",
                "recovered_ledgers_total",
                "healed_entries_total",
                "lost_entries_total",
                "repairs_postponed_total",
                "repair_locks_taken_by_others_total",
            ),
            0,
        )
        self.repairing: dict[int, None] = {}  # ledgers
        self._client = client
        self._components: LedgerComponents = client.components
        self._store = store
        self._queue = queue
        self._work = work
        self._watch = watch
        self._copier = copier
        self._healer = Healer(self._components.transport, copier)
        self._settings = settings
        self._owner = owner
        self._graces: dict[int, Grace] = {}
        # Ledger -> entries of which every copy is bad, as it was logged.
        self._lost: dict[int, dict[int, None]] = {}

    async def repair(self, task: Task, session: Session) -> None:
        """One attempt. Raises only what the metadata store raises; then, and cancelled, the lock is given back."""
        if task.ledger_id in self.repairing:
            return
        self.repairing[task.ledger_id] = None
        locked = False
        try:
            locked = await self._queue.lock(task.ledger_id, session, self._owner)
            if not locked:
                self.figures["repair_locks_taken_by_others_total"] += 1
                self._work.postpone(task)
                return
            if task.damaged:
                await self._heal(task)
            else:
                await self._repair_ledger(task)
        except (InvalidArgument, DataDirectoryError) as error:  # a node that cannot be read
            _log.error("a repair is not possible: %s", error)
            self._work.postpone(task)
        except MagnetarError:
            raise
        except Exception:  # a defect that one ledger meets must not stop the repair of all others
            _log.exception("the repair of ledger %d failed", task.ledger_id)
            self._work.postpone(task)
        finally:
            del self.repairing[task.ledger_id]
            if not session.lost:
                # Also when the answer to `lock` was lost: the node would stay as long as the session.
                with contextlib.suppress(MagnetarError):
                    await self._queue.unlock(task.ledger_id, session, self._owner)

    # --- under-replicated ledgers ------------------------------------------------------------------------------------

    async def _repair_ledger(self, task: Task) -> None:
        found = await self._queue.get(task.ledger_id)
        if found is None:
            self._work.done(task)
            return
        request, version = found
        core = RepairCore(
            task.ledger_id, request, self._settings.open_ledger_grace_s, self._graces.get(task.ledger_id)
        )
        instructions = deque(core.begin())
        loop = asyncio.get_running_loop()
        while instructions:
            instruction = instructions.popleft()
            event = await self._carry_out(task, core, instruction, request, version)
            if event is not None:
                instructions.extend(core.handle(event, loop.time(), self._watch.view))

    async def _carry_out(
        self, task: Task, core: RepairCore, instruction: Instruction, request: RepairRequest, version: int
    ) -> Event | None:
        ledger_id, c = task.ledger_id, self._components
        match instruction:
            case ReadMetadata():
                return await c.records.find(ledger_id)
            case WriteMetadata(metadata, at_version):
                return await c.records.write(ledger_id, metadata, at_version)
            case ChooseBookies():
                return c.chooser.replacements(instruction)
            case ChooseCompliant(bookies, exclude, metadata):
                return BookiesChosen(c.chooser.compliant_replacements(metadata, bookies, exclude))
            case CopyEntries():
                return await self._copy(ledger_id, instruction)
            case CheckCopies(metadata, bookie):
                healed = await self._healer.complete(ledger_id, metadata, bookie, self._watch.view.registered)
                self._count(bookie, ledger_id, healed)
                return Checked() if healed.whole else CopiesFailed(_reason(healed, bookie))
            case RecoverLedger():
                return await self._recover(ledger_id)
            case DeleteCopies(bookies):
                await self._delete_copies(ledger_id, bookies)
            case Repaired():
                self._graces.pop(ledger_id, None)
                self.figures["replaced_bookies_total"] += core.replaced
                if await self._queue.remove(ledger_id, version):
                    self.figures["repaired_ledgers_total"] += 1
                    _log.info("ledger %d is repaired (%d bookies replaced)", ledger_id, core.replaced)
                self._work.done(task)
            case Postponed(reason, until_s):
                self.figures["replaced_bookies_total"] += core.replaced
                self.figures["repairs_postponed_total"] += 1
                if core.grace is not None and len(self._graces) < _MAX_REMEMBERED:
                    self._graces[ledger_id] = core.grace
                self._work.postpone(task, until_s)
                if reason != request.note:
                    _log.warning("ledger %d stays in the queue: %s", ledger_id, reason)
                await self._queue.write_note(ledger_id, request, version, reason)
        return None

    async def _copy(self, ledger_id: int, wanted: CopyEntries) -> Copied | CopiesFailed | MetadataFailed:
        try:
            await self._copier.copy(
                ledger_id, wanted.metadata, wanted.fragment, wanted.targets, self._watch.view.registered
            )
        except (TargetFailed, SourceFailed) as error:
            # The bookies of a ledger that was deleted meanwhile deny its entries.
            found = await self._components.records.find(ledger_id)
            if isinstance(found, MetadataFailed) and isinstance(found.error, LedgerNotFound):
                return found
            if isinstance(error, TargetFailed):
                return CopiesFailed(str(error), (error.bookie,))
            if error.lost:
                self._report_lost(ledger_id, [error.entry_id])
            return CopiesFailed(str(error))
        return Copied()

    async def _recover(self, ledger_id: int) -> MetadataFound | MetadataFailed | RecoveryFailed:
        _log.warning(
            "ledger %d is open, and its last ensemble lost a bookie: it is fenced and closed", ledger_id
        )
        try:
            await self._client.open(ledger_id, recover=True)
        except LedgerNotFound as error:
            return MetadataFailed(error)
        except MagnetarError as error:
            return RecoveryFailed(f"it could not be recovered: {error.message}")
        self.figures["recovered_ledgers_total"] += 1
        return await self._components.records.find(ledger_id)

    async def _delete_copies(self, ledger_id: int, bookies: Sequence[str]) -> None:
        """A bookie that does not get it finds out by itself, when it next compares its ledgers with the metadata."""
        delete = self._components.transport.delete_ledger
        await asyncio.gather(*(delete(bookie, ledger_id) for bookie in bookies), return_exceptions=True)

    # --- damage ------------------------------------------------------------------------------------------------------

    async def _heal(self, task: Task) -> None:
        ledger_id, bookie = task.ledger_id, task.damaged
        path = damaged_path(bookie, ledger_id)
        node = await self._store.get(path)
        if node is None:
            self._work.done(task)
            return
        ranges = [(first, last) for first, last, _ in decode_ranges(node.value, path)]
        found = await self._components.records.find(ledger_id)
        healed = Healed()
        if isinstance(found, MetadataFailed):
            if not isinstance(found.error, LedgerNotFound):
                healed.postponed = found.error.message
        elif bookie not in self._watch.view.registered:
            healed.postponed = f"bookie {bookie} is not registered"
        else:
            healed = await self._healer.heal(
                ledger_id, found.metadata, bookie, ranges, self._watch.view.registered
            )
        self._count(bookie, ledger_id, healed)
        if not healed.whole:
            self.figures["repairs_postponed_total"] += 1
            self._work.postpone(task)
            return
        # More that was reported meanwhile changed the version: the node stays, and is looked at again.
        with contextlib.suppress(VersionConflict, NotFoundInStore):
            await self._store.delete(path, version=node.version)
        self._work.done(task)

    def _count(self, bookie: str, ledger_id: int, healed: Healed) -> None:
        self.figures["healed_entries_total"] += healed.written
        if healed.written:
            _log.info(
                "%d entries of ledger %d were written again at bookie %s", healed.written, ledger_id, bookie
            )
        if healed.lost:
            self._report_lost(ledger_id, healed.lost)

    def _report_lost(self, ledger_id: int, entries: Sequence[int]) -> None:
        """Each entry once."""
        known = self._lost.get(ledger_id, {})
        new = [entry_id for entry_id in entries if entry_id not in known]
        if not new:
            return
        if len(self._lost) < _MAX_REMEMBERED:
            self._lost.setdefault(ledger_id, {}).update(dict.fromkeys(new))
        self.figures["lost_entries_total"] += len(new)
        _log.error(
            "ledger %d has %d entries of which no good copy is left, from entry %d on; they stay reported, and nothing is "
            "deleted: bring a bookie back that had them, or restore one from a backup",
            ledger_id,
            len(new),
            new[0],
        )

    async def report_damage(self, bookie: str, ledger_id: int, first: int, last: int, reason: str) -> None:
        """Puts a copy that turned out to be damaged into the queue of damage."""
        await add_ranges(self._store, bookie, ledger_id, [(first, last, reason)])


def _reason(healed: Healed, bookie: str) -> str:
    if healed.postponed:
        return healed.postponed
    return f"no good copy is left of {len(healed.lost)} entries that bookie {bookie} should have, from {healed.lost[0]} on"
