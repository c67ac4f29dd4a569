"""Partitioned topics: a record of their own, and partitions that are topics like any other.

    (nothing)  --create-->  MAKING    record with 0 partitions, which keeps the name from being a topic's
    MAKING     --heads of all partitions, then the count by compare-and-set-->             SERVED
    SERVED     --grow: heads, with the durable subscriptions of partition 0, then the count--> SERVED
    any        --delete: the record is marked first-->                                     DELETING
    SERVED     --nobody uses any partition any more (`tenancy.inactivity`)-->              DELETING
    DELETING   --each partition by its owner, then the record-->                           (nothing)

A crash anywhere leaves one of these states, and the same call again goes on from there. Heads are written under a check of
the record's version, so none is made once a topic is DELETING, and whoever deletes finds all of them. A partition is never
made by its use: if its head is missing it does not exist. Subscriptions of new partitions begin at their first message, so
nobody who reads the whole topic misses what is stored there before he learns of them. Those that an interrupted growth left
hold nothing, for nobody can use a partition beyond the count; the next growth deletes those of which the topic has no more.

Any broker answers for the record; whoever has to do with a topic follows it (`followed`), and so learns of its growth and
its policies. "Partitioned or not" is decided by the store: each kind is made under the check that the other is absent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from magnetar.metadata import MetadataStore
from magnetar.metadata.store import Check, Create, Delete, Operation
from magnetar.proto.errors import (
    AlreadyExists,
    InvalidArgument,
    MagnetarError,
    NotFoundInStore,
    PartitionNotFound,
    TopicBusy,
    TopicNotFound,
    TopicTerminated,
    VersionConflict,
)
from magnetar.proto.ids import MAX_PARTITIONS, NO_PARTITION, TopicName
from magnetar.proto.policies import Policies
from magnetar.runtime.clock import Clock
from magnetar.runtime.quantities import counted

from ..cursors.entries import encode_acks
from ..cursors.pointer import NO_LEDGER, PointerRecord
from ..log.records import (
    ABSENT,
    TOPICS_ROOT,
    PartitionedRecord,
    Stored,
    TopicRecord,
    change,
    cursor_path,
    cursors_path,
    partitioned_path,
    replace,
    topic_path,
)
from ..tenancy.creation import Creation
from .followed import Followed
from .watches import TopicWatches

_CREATED_AT_ONCE = 200  # nodes of one commit: 100 KB


class PartitionedTopic(Stored[PartitionedRecord]):
    """A record as it was read."""

    __slots__ = ()

    @property
    def exists(self) -> bool:
        """True for a topic that is served, or being made."""
        return self.version != ABSENT and not self.record.deleting

    @property
    def partitions(self) -> int:
        """That users see; 0: it is no partitioned topic, or not yet, or not any more."""
        return self.record.partitions if self.exists else 0

    @property
    def abandoned(self) -> bool:
        """True if it is being deleted because nobody used any of its partitions: their owners delete them."""
        return self.record.deleting and 0 < self.record.partitions <= len(self.record.inactive)

    @property
    def policies(self) -> Policies:
        """For all of its partitions."""
        return self.record.policies


class PartitionedTopics:
    """See the module docstring. `followed` is to be closed in the end."""

    def __init__(
        self,
        metadata: MetadataStore,
        clock: Clock,
        watches: TopicWatches,
        creation: Creation,
    ) -> None:
        """`watches` are told of partitions that were made."""
        self._creation = creation
        self._noting = asyncio.Lock()
        self._noted: TopicName | None = None  # just now, by who has the lock
        self._metadata = metadata
        self._clock = clock
        self._watches = watches
        self.followed = Followed(
            metadata,
            lambda topic: partitioned_path(TopicName.parse(topic)),
            lambda topic: self.read(TopicName.parse(topic)),
            what="the partitioned topic",
            meanwhile="so that its growth and its policies are not known",
        )

    async def read(self, name: TopicName) -> PartitionedTopic:
        """As it is stored now; another broker's last change may be missing."""
        path = partitioned_path(name)
        stored = await self._metadata.get(path)
        if stored is None:
            return PartitionedTopic(PartitionedRecord.new(0), ABSENT)
        return PartitionedTopic(PartitionedRecord.decode(stored.value, path), stored.version)

    async def count(self, name: TopicName) -> int:
        """Its partitions; 0: it is not partitioned. Raises TopicBusy while it is being made."""
        if name.partition != NO_PARTITION:
            return 0
        found = await self.followed.get(str(name))
        if found.exists and not found.partitions:
            raise TopicBusy(
                f"{name} is being made with partitions; if nobody makes it any more, create it again or delete it"
            )
        return found.partitions

    async def watch(self, name: TopicName, changed: Callable[[int], None]) -> tuple[int, Callable[[], None]]:
        """As `count`, and `changed` is called with each later one until what is returned as well is called.

        Of 0 partitions there is no watch. Raises TopicBusy.
        """
        topic = str(name)

        def notify() -> None:
            if (found := self.followed.known(topic)) is not None:
                changed(found.partitions)

        def stop() -> None:
            self.followed.ignore(topic, notify)

        count = await self.count(name)
        if count:
            self.followed.listen(topic, notify)
            try:
                count = await self.count(name)
            except BaseException:
                stop()
                raise
        if not count:
            stop()
        return count, stop

    async def check(self, name: TopicName) -> None:
        """Before a partition is used. Raises PartitionNotFound, or TopicBusy if the topic has changed just now."""
        number, whole = name.partition, name.whole
        found = await self.followed.get(str(whole))
        if number < found.partitions:
            if number in found.record.inactive or name == self._noted:
                await self.note(name, inactive=False)
            return
        if found.version != ABSENT:  # which may be older than what others of the cluster have seen
            try:
                await self._metadata.commit([Check(partitioned_path(whole), found.version)])
            except (VersionConflict, NotFoundInStore):
                self.followed.drop(str(whole))
                raise TopicBusy(f"the partitions of {whole} have changed just now; try again") from None
        if found.partitions:
            reason = f"it has {counted(found.partitions, 'partition')}, numbered from 0; "
            reason += f"`magnetar topics update-partitions {whole.short} N` adds others"
        elif found.version == ABSENT:
            command = f"magnetar topics create {whole.short} --partitions N"
            reason = f"it is no partitioned topic; `{command}` makes one of up to {MAX_PARTITIONS:,}"
        else:
            reason = "it is being deleted" if found.record.deleting else "it is being made"
        raise PartitionNotFound(f"{whole} has no partition {number}: {reason}")

    async def note(
        self, name: TopicName, *, inactive: bool, still: Callable[[], bool] = lambda: True
    ) -> None:
        """By the owner of a partition, if it is so `still`: nobody uses it any more; or before somebody does again.

        When nobody uses any of them the topic is `abandoned`. Raises TopicNotFound.
        """

        def edit(was: PartitionedRecord) -> PartitionedRecord:
            noted = {*was.inactive, name.partition} if inactive else {*was.inactive} - {name.partition}
            deleting = 0 < was.partitions <= len(noted)
            return msgspec.structs.replace(was, inactive=sorted(noted), deleting=deleting)

        async with self._noting:
            self._noted = name
            try:
                if still():
                    await self.change(name.whole, edit)
            finally:
                self._noted = None

    async def missing(self, name: TopicName) -> MagnetarError:
        """Why there is no topic of this name, which is no partition's."""
        found = await self.read(name)
        if found.partitions:
            return InvalidArgument(
                f"{name} is a partitioned topic: this is asked of each of its {found.partitions} partitions, "
                f"{name.partition_of(0).short} and so on, as a client of this version does"
            )
        return TopicNotFound(f"topic {name} does not exist")

    # --- changes -----------------------------------------------------------------------------------------------------

    async def create(self, name: TopicName, partitions: int) -> None:
        """Makes it, or finds it with so many partitions. Raises AlreadyExists, InvalidArgument, TopicBusy."""
        _check_partitions(name, partitions)
        while (found := await self.read(name)).version == ABSENT or (
            found.abandoned and not await self.delete(name)  # whoever deleted it has not come to its end
        ):
            record, path = PartitionedRecord.new(self._clock.now_ms()), partitioned_path(name)
            nodes: list[Operation] = [Check(topic_path(name), None), Create(path, record.encode())]
            try:
                await self._creation.make(name, nodes, partitions)
            except VersionConflict:
                raise AlreadyExists(
                    f"topic {name} exists and is not partitioned; delete it first, or choose another name"
                ) from None
            except AlreadyExists:
                pass  # somebody else makes it
        if not found.exists:
            raise TopicBusy(
                f"{name} is being deleted; delete it again if nobody does any more, then create it"
            )
        if found.partitions not in (0, partitions):
            raise AlreadyExists(
                f"{name} has {found.partitions} partitions; `magnetar topics update-partitions {name.short} N` adds some"
            )
        await self._grow(name, found, partitions)

    async def update(self, name: TopicName, partitions: int) -> int:
        """The topic has so many from now on. Raises TopicNotFound, InvalidArgument for fewer than before, TopicBusy,
        TopicTerminated.
        """
        _check_partitions(name, partitions)
        found = await self.read(name)
        if not found.exists:
            raise TopicNotFound(
                f"there is no partitioned topic {name}; `magnetar topics create {name.short} --partitions {partitions}` "
                "makes one"
            )
        if partitions < found.partitions:
            raise InvalidArgument(
                f"{name} has {found.partitions} partitions and cannot have {partitions}: a topic never has fewer than "
                "before, because the others hold messages; make another topic to have fewer"
            )
        await self._grow(name, found, partitions)
        return partitions

    async def _grow(self, name: TopicName, found: PartitionedTopic, partitions: int) -> None:
        before = found.record.partitions
        if before == partitions:
            return
        await self._check_not_terminated(name.partition_of(0))
        names = [name.partition_of(number) for number in range(before, partitions)]
        try:
            await self._make(name, found, names)
            record = msgspec.structs.replace(found.record, partitions=partitions)
            await self._replace(name, record, found.version)
        except (VersionConflict, NotFoundInStore) as conflict:
            raise TopicBusy(f"{name} is being changed by somebody else; try again") from conflict
        for one in names:
            self._watches.changed(one, exists=True)

    async def _check_not_terminated(self, first: TopicName) -> None:
        """A topic is terminated as a whole, and so has no new partitions, as its first one says. Raises TopicTerminated."""
        path = topic_path(first)
        stored = await self._metadata.get(path)
        if stored is not None and TopicRecord.decode(stored.value, path).terminated:
            raise TopicTerminated(f"topic {first.whole} was terminated, and gets no more partitions")

    async def _make(self, name: TopicName, found: PartitionedTopic, names: list[TopicName]) -> None:
        """Writes the heads of partitions, and their subscriptions; what is there already stays. Raises VersionConflict."""
        now_ms = self._clock.now_ms()
        head = TopicRecord.new(now_ms).encode()
        pointer = PointerRecord(NO_LEDGER, [encode_acks((0, 0, 0), [])], now_ms, {}, [], False).encode()
        subscriptions = await self._subscriptions(name.partition_of(0)) if found.record.partitions else []
        nodes = [Create(topic_path(one), head) for one in names]
        nodes += [Create(cursor_path(one, name), pointer) for one in names for name in subscriptions]
        check = Check(partitioned_path(name), found.version)
        if found.record.partitions:
            await self._delete_leftovers(name, found, subscriptions)
        for at in range(0, len(nodes), _CREATED_AT_ONCE):
            part = nodes[at : at + _CREATED_AT_ONCE]
            try:
                await self._metadata.commit([check, *part])
            except AlreadyExists:  # a call that was interrupted made some of them
                for node in part:
                    with contextlib.suppress(AlreadyExists):
                        await self._metadata.commit([check, node])

    async def _delete_leftovers(
        self, name: TopicName, found: PartitionedTopic, subscriptions: list[str]
    ) -> None:
        """Of an interrupted growth: subscriptions that the topic does not have any more."""
        check = Check(partitioned_path(name), found.version)
        for number in await self._partitions_left(name):
            if number >= found.record.partitions:
                partition = name.partition_of(number)
                stored = await self._metadata.children(cursors_path(partition))
                for subscription in sorted(set(stored).difference(subscriptions)):
                    await self._metadata.commit([check, Delete(cursor_path(partition, subscription))])

    async def _subscriptions(self, first: TopicName) -> list[str]:
        """The durable subscriptions of a partition."""
        found = []
        for name in await self._metadata.children(cursors_path(first)):
            path = cursor_path(first, name)
            stored = await self._metadata.get(path)
            if stored is not None and not PointerRecord.decode(stored.value, path).deleting:
                found.append(name)
        return found

    async def delete(self, name: TopicName) -> list[int] | None:
        """The numbers of the partitions that are to be deleted before this is called again; none: the topic is deleted.

        None: there is no such partitioned topic. Raises TopicBusy.
        """
        found = await self.read(name)
        if found.version == ABSENT:
            return None
        try:
            version = found.version
            if not found.record.deleting:
                version = await self._replace(
                    name, msgspec.structs.replace(found.record, deleting=True), version
                )
            left = await self._partitions_left(name)
            if not left:
                await self._creation.forget(name)
                await self._metadata.delete(partitioned_path(name), version=version)
        except VersionConflict as conflict:
            raise TopicBusy(f"{name} is being changed by somebody else; try again") from conflict
        except NotFoundInStore:  # somebody else deleted it
            return []
        return left

    async def check_deletable(self, name: TopicName) -> None:
        """Of a partition. Raises InvalidArgument while its topic needs it."""
        whole = name.whole
        found = await self.read(whole)
        if found.exists:
            raise InvalidArgument(
                f"partition {name.partition} of {whole} cannot be deleted alone: its partitions have the numbers from 0 to "
                f"{found.partitions - 1}; delete the topic, or clear the backlog of the partition's subscriptions"
            )

    async def _partitions_left(self, name: TopicName) -> list[int]:
        """Those that have a head."""
        parent, start = f"{TOPICS_ROOT}/{name.full_namespace}/{name.domain}", f"{name.name}-partition-"
        found: list[int] = []
        after, more = start, True
        while more:
            names = await self._metadata.children(parent, after=after, limit=MAX_PARTITIONS)
            those = [name._replace(name=one) for one in names if one.startswith(start)]
            found += [one.partition for one in those if one.partition != NO_PARTITION and one.whole == name]
            more = len(those) == MAX_PARTITIONS
            after = names[-1] if names else after
        return sorted(found)

    async def change_policies(self, name: TopicName, changes: Mapping[str, Any]) -> int:
        """As `Policies.changed`; the new version. Raises TopicNotFound, InvalidArgument."""

        def edit(was: PartitionedRecord) -> PartitionedRecord:
            policies = was.policies.changed(changes)
            version = was.policies_version + (policies != was.policies)
            return msgspec.structs.replace(was, policies=policies, policies_version=version)

        return (await self.change(name, edit)).policies_version

    async def change(
        self, name: TopicName, edit: Callable[[PartitionedRecord], PartitionedRecord]
    ) -> PartitionedRecord:
        """What `edit` makes of the record takes its place (`log.records.change`). Raises TopicNotFound."""

        async def read() -> PartitionedTopic:
            found = await self.read(name)
            if not found.exists:
                raise await self.missing(name)
            return found

        try:
            return (await change(self._metadata, partitioned_path(name), read, edit)).record
        finally:
            self.followed.drop(str(name))

    async def _replace(self, name: TopicName, record: PartitionedRecord, version: int) -> int:
        try:
            return await replace(self._metadata, partitioned_path(name), record.encode(), version)
        finally:
            self.followed.drop(str(name))


def _check_partitions(name: TopicName, partitions: int) -> None:
    """Raises InvalidArgument, or InvalidTopicName for a name that is too long for so many."""
    if name.partition != NO_PARTITION:
        raise InvalidArgument(
            f"{name} would be a partition of {name.whole.short}, which cannot have partitions of its own; choose a name "
            "that does not end in -partition- and a number"
        )
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise InvalidArgument(f"a topic has 1 to {MAX_PARTITIONS:,} partitions, not {partitions:,}")
    name.partition_of(partitions - 1)
