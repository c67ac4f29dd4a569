"""What `archive(trim=True)` does with ledgers whose manifests stand: they leave the bookies, the topic says where they are.

1. The broker is asked, without doing anything, how far it would go: subscriptions, readers and leases may need a ledger.
2. Every file of these ledgers is read again, compared with its digest and counted; whoever wrote it, and whenever.
3. The broker records the archive's location and lets go of the ledgers (`broker.export.archived`), in one step.

A job that is killed between two steps has changed nothing, or all; another run goes on where it was. Ledgers that cannot be
trimmed stay, with all after them, since only the beginning of a topic is archived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from pyspark.sql import SparkSession

from magnetar.archive.files import ArchivedFile, ArchiveFolder, LedgerManifest
from magnetar.client import Client
from magnetar.client.administration import ask
from magnetar.proto.commands import ArchiveLedgers
from magnetar.proto.errors import InvalidArgument

from ..leases import keep
from ..options import ReadOptions
from ..plan import TopicLedger, portions
from ..service import TopicPlan, asking

# Of one request: the broker deletes them one after another, and a topic that rolls over waits for that.
LEDGERS_AT_ONCE: Final = 100
ROUND_BYTES: Final = 4 << 30
# Files are of unequal size, and a task for each would be too many where they are small.
TASKS_PER_CORE: Final = 4


@dataclass(frozen=True, slots=True)
class KeptLedgers:
    """Archived ledgers of a topic that were to be trimmed and still are at the bookies, from `first` (position id) on.

    `damaged`: their archive is not what it should be; else somebody needs them, and a later run may trim them.
    """

    topic: str
    first: int
    ledgers: int
    reason: str
    damaged: bool


Pairs = Sequence[tuple[TopicLedger, LedgerManifest]]
# The first ledger that stays, why it does, and whether its archive is damaged.
Stopped = tuple[int, str, bool]


@dataclass(slots=True)
class Trimming:
    """Of one topic: `run` trims as many archived ledgers as can be, and says in `kept` why not more of them.

    Those that are archived elsewhere (`moved`) are recorded as being in this archive. `not_in_topic`: those that the broker
    trimmed before their archive was recorded, as nobody needed them.
    """

    spark: SparkSession
    options: ReadOptions
    folder: ArchiveFolder
    plan: TopicPlan
    with_backlog: bool
    trimmed: list[TopicLedger] = field(default_factory=list)
    moved: int = 0
    not_in_topic: int = 0
    kept: KeptLedgers | None = None

    def run(self, archived: Sequence[tuple[TopicLedger, LedgerManifest | None]]) -> None:
        """In the topic's order."""
        pairs, wrong = self._good(archived)
        # A round has to end before its lease does, and its files are read in it.
        for some in (*portions(pairs, lambda pair: pair[0].size, ROUND_BYTES, LEDGERS_AT_ONCE), None):
            stopped = wrong if some is None else self._round(some)
            if stopped is not None:
                first, reason, damaged = stopped
                left = len(archived) - len(self.trimmed) - self.moved - self.not_in_topic
                self.kept = KeptLedgers(self.plan.topic, first, left, reason, damaged)
                break

    def _good(
        self, archived: Sequence[tuple[TopicLedger, LedgerManifest | None]]
    ) -> tuple[Pairs, Stopped | None]:
        """The first of them, as far as they have a manifest that is theirs, and what is wrong with the next one."""
        pairs: list[tuple[TopicLedger, LedgerManifest]] = []
        for ledger, manifest in archived:
            path = self.folder.manifest_path(self.plan.topic, ledger.position_id)
            if manifest is None:
                reason = f"it is archived at {ledger.archive}, and {path} is not there; copy the whole archive first"
                return pairs, (ledger.position_id, reason, True)
            if wrong := manifest.differs_from(self.plan.topic, ledger):
                return pairs, (ledger.position_id, _OF_ANOTHER.format(path=path, wrong=wrong), True)
            pairs.append((ledger, manifest))
        return pairs, None

    def _round(self, pairs: Pairs) -> Stopped | None:
        """Returns why it did not come to its end."""
        try:
            stopped, _ = self._ask(pairs, dry=True)
            pairs = _before(stopped, pairs)
            if damaged := self._damaged(pairs):
                stopped, pairs = damaged, _before(damaged, pairs)
            came, gone = self._ask(pairs, dry=False)
        except InvalidArgument as refused:
            return pairs[0][0].position_id, refused.message, True
        if came is not None:  # somebody who needs it, meanwhile
            stopped, pairs = came, _before(came, pairs)
        self.trimmed += [
            ledger for ledger, _ in pairs if not ledger.archive and ledger.position_id not in gone
        ]
        self.moved += sum(bool(ledger.archive) for ledger, _ in pairs)
        self.not_in_topic += len(gone)
        return stopped

    def _ask(self, pairs: Pairs, *, dry: bool) -> tuple[Stopped | None, set[int]]:
        """What the broker keeps, and what is not in the topic any more."""
        if not pairs:
            return None, set()
        rows = [[one.ledger, one.stored_ledger, one.entries, one.rows] for _, one in pairs]
        moved = any(ledger.archive for ledger, _ in pairs)
        topic, lease = self.plan.topic, self.plan.lease
        command = ArchiveLedgers(0, topic, self.folder.location, lease, dry, moved, self.with_backlog)

        async def work(client: Client) -> dict[str, Any]:
            await keep(client, topic, lease, self.options.lease_s)
            answer: dict[str, Any] = await ask(
                client.admin, command, topic=topic, payload=msgspec.msgpack.encode(rows)
            )
            return answer

        answer = asking(self.options, work)
        kept = answer["kept"]
        return None if kept is None else (*kept, False), set(answer["gone"])

    def _damaged(self, pairs: Pairs) -> Stopped | None:
        """The first of them whose files are not as they were written; where all are, all of it is durable."""
        found: dict[int, str] = {}
        files: list[tuple[int, ArchivedFile]] = []
        folder, topic = self.folder, self.plan.topic
        for _, manifest in pairs:
            if missing := folder.missing(manifest):
                # As the driver sees it: workers may write to disks of their own.
                path = folder.data_path(topic, manifest.ledger, missing[0])
                found[manifest.ledger] = f"{path} is not there, or of another size"
            else:
                files += [(manifest.ledger, one) for one in manifest.files]
                folder.sync_manifest(manifest)
        place = folder.place

        def check(item: tuple[int, ArchivedFile]) -> str:
            return ArchiveFolder(place).check_file(topic, *item)

        if files:
            context = self.spark.sparkContext
            tasks = min(len(files), context.defaultParallelism * TASKS_PER_CORE)
            for (ledger, _), wrong in zip(
                files, context.parallelize(files, tasks).map(check).collect(), strict=True
            ):
                if wrong:
                    found.setdefault(ledger, wrong)
        if not found:
            return None
        first = min(found)
        known_at = next(ledger.archive for ledger, _ in pairs if ledger.position_id == first)
        cure = f"delete {folder.manifest_path(topic, first)}, and the ledger is archived again"
        if known_at:
            cure = f"copy it again from {known_at}"
        return first, f"{found[first]}; {cure}", True


def _before(stopped: Stopped | None, pairs: Pairs) -> Pairs:
    return pairs if stopped is None else [pair for pair in pairs if pair[0].position_id < stopped[0]]


def foreign(
    folder: ArchiveFolder,
    plan: TopicPlan,
    manifests: Mapping[int, LedgerManifest],
    ledgers: Sequence[TopicLedger],
) -> KeptLedgers | None:
    """Ledgers that are not archived because a manifest of something else stands in their place."""
    found = [
        (ledger, wrong)
        for ledger in ledgers
        if (wrong := manifests[ledger.position_id].differs_from(plan.topic, ledger))
    ]
    if not found:
        return None
    first, wrong = found[0][0].position_id, found[0][1]
    reason = _OF_ANOTHER.format(path=folder.manifest_path(plan.topic, first), wrong=wrong)
    return KeptLedgers(plan.topic, first, len(found), reason, True)


_OF_ANOTHER: Final = (
    "{path} is of something else: {wrong}; delete it, or archive to another path if this one "
    "is that of another service"
)
