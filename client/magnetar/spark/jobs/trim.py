"""What `archive(trim=True)` does with ledgers whose manifests stand: they leave the bookies, the topic says where they are.

1. The broker is asked, without doing anything, how far it would go: subscriptions, readers and leases may need a ledger.
2. Every file of these ledgers is read again, compared with its digest and counted; whoever wrote it, and whenever.
3. The broker records the archive's location and lets go of the ledgers (`broker.export.archived`), in one step.

A job that is killed between two steps has changed nothing, or all; another run goes on where it was. Ledgers that cannot be
trimmed stay, with all after them, since only the beginning of a topic is archived.
"""

from __future__ import annotations

import itertools
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


@dataclass(slots=True)
class TrimResult:
    """Of one topic. `moved`: ledgers that were archived elsewhere before. `not_in_topic`: those that the broker trimmed
    before their archive was recorded, as nobody needed them.
    """

    trimmed: list[TopicLedger] = field(default_factory=list)
    moved: int = 0
    not_in_topic: int = 0
    kept: KeptLedgers | None = None


Pairs = Sequence[tuple[TopicLedger, LedgerManifest]]
# The first ledger that stays, why it does, and whether its archive is damaged.
Stopped = tuple[int, str, bool]


def trim_topic(
    spark: SparkSession,
    options: ReadOptions,
    folder: ArchiveFolder,
    plan: TopicPlan,
    archived: Sequence[tuple[TopicLedger, LedgerManifest | None]],
    *,
    with_backlog: bool,
) -> TrimResult:
    """Trims as many of these ledgers, which are in the topic's order, as can be; also says why not more of them.

    Those that are archived elsewhere are recorded as being in this archive.
    """
    result = TrimResult()
    pairs, wrong = _good(folder, plan, archived)
    # A round has to end before its lease does, and its files are read in it.
    for some in (*portions(pairs, lambda pair: pair[0].size, ROUND_BYTES, LEDGERS_AT_ONCE), None):
        stopped = wrong if some is None else _trim(spark, options, folder, plan, some, result, with_backlog)
        if stopped is not None:
            first, reason, damaged = stopped
            left = len(archived) - len(result.trimmed) - result.moved - result.not_in_topic
            result.kept = KeptLedgers(plan.topic, first, left, reason, damaged)
            break
    return result


def _good(
    folder: ArchiveFolder, plan: TopicPlan, archived: Sequence[tuple[TopicLedger, LedgerManifest | None]]
) -> tuple[Pairs, Stopped | None]:
    """The first of them, as far as they have a manifest that is theirs, and what is wrong with the next one."""
    pairs: list[tuple[TopicLedger, LedgerManifest]] = []
    for ledger, manifest in archived:
        path = folder.manifest_path(plan.topic, ledger.position_id)
        if manifest is None:
            reason = (
                f"it is archived at {ledger.archive}, and {path} is not there; copy the whole archive first"
            )
            return pairs, (ledger.position_id, reason, True)
        if wrong := manifest.differs_from(plan.topic, ledger):
            return pairs, (ledger.position_id, _OF_ANOTHER.format(path=path, wrong=wrong), True)
        pairs.append((ledger, manifest))
    return pairs, None


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


def _trim(
    spark: SparkSession,
    options: ReadOptions,
    folder: ArchiveFolder,
    plan: TopicPlan,
    archived: Pairs,
    result: TrimResult,
    with_backlog: bool,
) -> Stopped | None:
    """One round. Returns why it did not come to its end."""
    stopped: Stopped | None = None
    try:
        answer = _ask(options, folder, plan, archived, with_backlog, dry=True)
        if answer["kept"] is not None:
            first, reason = answer["kept"]
            stopped = (first, reason, False)
            archived = [pair for pair in archived if pair[0].position_id < first]
        damaged = _damaged(spark, folder, plan.topic, [manifest for _, manifest in archived])
        if damaged:
            first = min(damaged)
            known_at = next(ledger.archive for ledger, _ in archived if ledger.position_id == first)
            path = folder.manifest_path(plan.topic, first)
            cure = (
                f"copy it again from {known_at}"
                if known_at
                else f"delete {path}, and the ledger is archived again"
            )
            stopped = (first, f"{damaged[first]}; {cure}", True)
            archived = list(itertools.takewhile(lambda pair: pair[0].position_id < first, archived))
        answer = _ask(options, folder, plan, archived, with_backlog, dry=False)
    except InvalidArgument as refused:
        return archived[0][0].position_id, refused.message, True
    if answer["kept"] is not None:  # somebody came meanwhile
        first, reason = answer["kept"]
        stopped = (first, reason, False)
        archived = [pair for pair in archived if pair[0].position_id < first]
    gone = set(answer["gone"])
    result.trimmed += [
        ledger for ledger, _ in archived if not ledger.archive and ledger.position_id not in gone
    ]
    result.moved += sum(bool(ledger.archive) for ledger, _ in archived)
    result.not_in_topic += len(gone)
    return stopped


def _ask(
    options: ReadOptions,
    folder: ArchiveFolder,
    plan: TopicPlan,
    archived: Pairs,
    with_backlog: bool,
    *,
    dry: bool,
) -> dict[str, Any]:
    if not archived:
        return {"gone": [], "kept": None}
    rows = [
        [manifest.ledger, manifest.stored_ledger, manifest.entries, manifest.rows] for _, manifest in archived
    ]

    async def work(client: Client) -> dict[str, Any]:
        await keep(client, plan.topic, plan.lease, options.lease_s)
        moved = any(ledger.archive for ledger, _ in archived)
        command = ArchiveLedgers(0, plan.topic, folder.location, plan.lease, dry, moved, with_backlog)
        payload = msgspec.msgpack.encode(rows)
        answer: dict[str, Any] = await ask(client.admin, command, topic=plan.topic, payload=payload)
        return answer

    return asking(options, work)


def _damaged(
    spark: SparkSession, folder: ArchiveFolder, topic: str, manifests: Sequence[LedgerManifest]
) -> Mapping[int, str]:
    """What is wrong with the files of ledgers, by position id; where nothing is, all of it is durable."""
    found: dict[int, str] = {}
    files: list[tuple[int, ArchivedFile]] = []
    for manifest in manifests:
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
        context = spark.sparkContext
        tasks = min(len(files), context.defaultParallelism * TASKS_PER_CORE)
        told = context.parallelize(files, tasks).map(check).collect()
        for (ledger, _), wrong in zip(files, told, strict=True):
            if wrong:
                found.setdefault(ledger, wrong)
    return found
