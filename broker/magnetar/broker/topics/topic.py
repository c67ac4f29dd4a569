"""A topic: its producers, coalescer, managed ledger, tail cache and subscriptions. It knows no wire protocol.

    publish --> Coalescer --call_soon--> ManagedLedger.append (while its pipeline has room)
    entries answered in one loop turn --call_soon--> receipts, one call per producer; cache; dispatch; the next entries

`load` recovers the ledger list, and then the durable cursors concurrently; a cursor that cannot be read costs only its own
subscription (`cursors.recovery`). A topic that learns of another owner fences itself: it confirms nothing more, and the
registry ends and forgets it. `end` releases a topic in the same order, whatever ended it: queued entries, cursors,
background work, ledger and ledger list. Only then are its producers and consumers sent to look the topic up again.

A non-persistent topic is the same: its head in the metadata store says that it exists, and fences a former owner, but names
no ledger. What its messages are in is a matter of its managed ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from magnetar.proto.admission import AdmittedGroups
from magnetar.proto.entry import Entry
from magnetar.proto.errors import (
    MagnetarError,
    QuorumLost,
    SequenceIdError,
    TopicBusy,
    TopicInUse,
    TopicNotFound,
)
from magnetar.proto.ids import DUPLICATE_ID, MAX_MESSAGES_PER_BATCH, MessageId, TopicName
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.tasks import TaskSet
from magnetar.runtime.timeouts import TimeLimit
from magnetar.runtime.weak import weak_callback

from ..compaction.topic_compaction import TopicCompaction
from ..cursors.core.acks import Position
from ..dispatch.core.consumer import Consumer
from ..dispatch.core.delay_index import Run
from ..dispatch.core.entry_source import DispatchCounters
from ..dispatch.dispatcher import notify_closed
from ..dispatch.readers import Readers
from ..export.leases import Leases
from ..export.topic_export import TopicExport
from ..log.appending import LedgerEvents
from ..log.ledger_list import LedgerList, terminated
from ..log.managed_ledger import ManagedLedger
from ..log.records import LedgerInfo, cursors_path, staged_path
from ..log.tail_cache import TopicCache
from ..resources.budget import ByteBudget
from ..resources.moving_rates import MovingRates
from .backlog_quota import BacklogQuota
from .coalescer import NOT_STORED, Coalescer, GatheredEntry, ReceiptRun, Totals, first_too_large, measure
from .components import Components
from .core.deduplication import Pushed
from .core.producers import ACCESS_MODES, Claim, ProducerPort, Producers, ProducerSession, SessionState
from .deduplication import Deduplication
from .delays import KIND as DELAYS
from .delays import TopicDelays
from .limits import TopicLimits
from .log_state import LogStates
from .maintenance import Maintenance
from .policies import TopicPolicies
from .probing import probe
from .producer_access import let_in
from .retention import Retention
from .subscriptions import Subscriptions

_log = logging.getLogger(__name__)

DUPLICATE_BYTES = (
    100  # of the publish budget, for a run of them that waits: somebody may send one again and again
)


class Topic:
    """See the module docstring. Made by `load`."""

    def __init__(self, name: TopicName, components: Components, on_fenced: Callable[[Topic], None]) -> None:
        self.name = name
        self._components = components
        self._settings = settings = components.settings
        self._on_fenced = on_fenced
        self._loop = asyncio.get_running_loop()
        # What its parts call does not keep it: a topic that was unloaded is freed without the garbage collector.
        append_soon, ledgers_changed = weak_callback(self._append_soon), weak_callback(self._ledgers_changed)
        fence, delayed = weak_callback(self.fence), weak_callback(self._delayed)
        self.producers = Producers(str(name), settings.producer_drain_timeout_ms)
        self.publish_budget = ByteBudget(settings.max_topic_publish_bytes, components.publish_budget)
        self._coalescer = Coalescer(settings.max_entry_bytes)
        self.cache = TopicCache(components.cache, settings.read_ahead_bytes)
        self.readers = Readers(self.cache.drop_before)
        ledgers = LedgerList(name, components.metadata, components.creation.make)
        self.policies = TopicPolicies(name, ledgers, components.namespaces, components.partitioned.followed)
        self.ledger: ManagedLedger[GatheredEntry] = ManagedLedger(
            ledgers, components.metadata, components.ledgers, components.archives, self.cache,
            components.rings, components.shared_reads, settings, components.clock,
            LedgerEvents(
                weak_callback(self._confirmed), weak_callback(self._accepted), append_soon, ledgers_changed, fence, delayed,
                weak_callback(self._leaving),
            ),
            self.policies.durability,
        )  # fmt: skip
        self.log = self.ledger.reading
        self.states = LogStates(self.ledger, components)
        self.deduplication = Deduplication(name, self.states, self.producers, self.policies, components)
        self.compaction = TopicCompaction(
            self.ledger,
            components.ledgers,
            settings,
            components.compactions,
            self.policies.in_force,
            components.clock.now_ms,
            ledgers_changed,
        )
        self._tasks = TaskSet(f"topic {name}")
        self.delays = TopicDelays(
            self.states,
            self.policies.in_force,
            components.clock,
            self._tasks,
            weak_callback(self._delays_known),
            delayed,
            weak_callback(self._delays_due),
            fence,
        )
        self.limits = TopicLimits(
            name, components, self.policies.in_force, self.producers, self._coalescer, append_soon
        )
        self.dispatched = DispatchCounters(components.dispatched)
        self.rates = MovingRates(5)  # messages and bytes in, messages and bytes out, messages dropped
        self.subscriptions = Subscriptions(
            self.ledger,
            self.compaction,
            self.readers,
            self.dispatched,
            components,
            self._tasks,
            weak_callback(self.check_served),
            self.delays,
            self.limits,
        )
        self._leases = Leases(settings, self._loop.time)
        self.retention = Retention(
            self.ledger.list,
            self.subscriptions,
            self.states,
            self._leases,
            self.policies.in_force,
            components.clock,
        )
        self._export: TopicExport | None = None  # made when first used: few topics need it
        self.maintenance = Maintenance(
            self.ledger,
            self.subscriptions,
            self.retention,
            self.compaction,
            self.policies.in_force,
            components.clock,
        )
        self.quota = BacklogQuota(
            self.ledger, self.limits, self.subscriptions, self.producers, self.maintenance
        )
        self._append_scheduled = False
        # What the ledger has answered since the last `_send_receipts`: ledger, entry, stored bytes, the gathered entry, and
        # whether it is confirmed. With flush=async an entry comes twice: accepted (False), then confirmed (True).
        self._answered_entries: list[tuple[int, int, bytes | None, GatheredEntry, bool]] = []
        self.not_served: MagnetarError | None = None  # why it is not served here any more; None while it is
        self._fenced = False  # nothing may be written any more
        self._drained: asyncio.Future[None] | None = (
            None  # nothing is queued: `end` and `terminate` wait for it
        )
        self._terminating = asyncio.Lock()
        self.messages_in = 0
        self.bytes_in = 0
        self.receipted_entries = 0
        self.publish_s = 0.0  # of `receipted_entries`: the times from append to receipt, summed
        self.loaded_at = self._loop.time()
        self.used_at = self._loop.time()  # when somebody asked for the topic, or maintenance found it in use

    # --- loading -----------------------------------------------------------------------------------------------------

    async def load(self, *, create: bool) -> bool:
        """Takes the topic over and recovers its cursors; True if it was made. Raises TopicNotFound, TopicBusy."""
        existed = await self.ledger.open(create=create)
        if self.ledger.list.record.deleting:  # a deletion was interrupted: it is completed first
            await self._delete_rest(self.export)
            existed = await self.ledger.open(create=create)
        self.producers.topic_epoch = self.ledger.list.record.topic_epoch
        if self.log.ended:
            self._answer_producers()
        if existed:  # who had it last is looking for it now
            self.producers.reserved_until = self._grace_ends()
        metadata = self._components.metadata
        await self.policies.learn(self._policies_changed)
        self._limits_changed()
        stored: list[str] = []
        if existed:
            self._leases.taken_over()
            staged = await metadata.children(staged_path(self.name), limit=1)
            if staged or self.ledger.list.record.publishing:
                await self.export.load()
            stored = await self.states.stored()
            if DELAYS in stored:
                self.delays.load()
        await asyncio.gather(self.subscriptions.load(), self.deduplication.load(stored))
        self.check_served()  # a cursor may have met another owner
        return not existed

    async def change_policies(self, changes: Mapping[str, Any]) -> int:
        """Of the topic's own policies, as `Policies.changed`; returns their new version. Raises InvalidArgument."""
        version = await self.policies.change(self.ledger.changes, changes)
        self.ledger.appending.look_at_durability()
        self.deduplication.policies_changed()
        self._limits_changed()
        return version

    async def terminate(self) -> MessageId | None:
        """Nothing follows what is queued now; its last message, once that is durable. It may be done again.

        Until then producers are neither told nor let in. Raises QuorumLost if what is queued can be neither stored nor
        refused, TopicNotServed; then producers go on.
        """
        timeout_ms = self.producers.drain_timeout_ms
        late = QuorumLost(
            f"topic {self.name} is not terminated: what is queued was neither stored nor refused within "
            f"producer_drain_timeout_ms={timeout_ms}; look whether enough bookies can be written to, and try again"
        )
        async with self._terminating:
            if not self.log.ended:
                self.check_served()
                self.producers.stop(TopicBusy(f"topic {self.name} is being terminated; try again"))
                try:
                    async with TimeLimit(timeout_ms / 1000, lambda: late):
                        await self._until_drained()
                        while not await self.ledger.appending.edit_closed(self._store_end):
                            await self._until_drained()
                finally:
                    self._answer_producers()
                self.readers.notify()
        last = self.ledger.list.record.last_message
        return None if last is None else MessageId(*last, self.name.partition)

    async def _store_end(self) -> bool:
        """While no ledger is open. False: something came back from the ledger that was closed, and is stored first."""
        if self.publish_budget.used or self.ledger.appending.outstanding_bytes:
            return False
        last = self.ledger.list.last_entry()
        if last is None:
            await self.ledger.list.commit(terminated=True)
            return True
        try:
            count = await self.log.read_message_count(last)
        except MagnetarError as error:
            if error.retryable:
                raise
            count = 1  # it is lost: of the entry, its first message is known to have been there
        await self.ledger.list.commit(terminated=True, last_message=(*last, count - 1))
        return True

    def _answer_producers(self) -> None:
        """It is terminated, or could not be."""
        if self.not_served is not None:
            return
        if self.log.ended:
            self.producers.close_all(terminated(self.ledger.list), final=True)
        else:
            error = TopicBusy(f"topic {self.name} could not be terminated")
            self.producers.resume(error, self._grace_ends())

    async def _until_drained(self) -> None:
        """Nothing is queued: what was is confirmed or failed."""
        if self.publish_budget.used:
            if self._drained is None or self._drained.done():
                self._drained = self._loop.create_future()
            self._append_soon()  # what waits for its rate
            await asyncio.wait([self._drained])

    def _policies_changed(self) -> None:
        self.ledger.appending.durability_changed()
        self.deduplication.policies_changed()
        self._limits_changed()

    def _limits_changed(self) -> None:
        if self.limits.policies_changed(self.subscriptions.values()):
            self.quota.policies_changed()

    @property
    def export(self) -> TopicExport:
        """For clients that read and write the topic's ledgers at the bookies themselves. Raises TopicNotServed."""
        if self._export is None:
            self.check_served()
            self._export = TopicExport(
                self.name, self.ledger, self._leases, self.retention.lowest, self._components
            )
        return self._export

    # --- publishing --------------------------------------------------------------------------------------------------

    async def open_producer(self, claim: Claim, new_port: Callable[[int], ProducerPort]) -> ProducerSession:
        """A session to publish with; `new_port` makes its port, given the epoch.

        Waits until nothing can still be stored that an older session of the name, or whoever published before an exclusive
        producer, has queued (rule 33). Raises as `Producers.open`, and TopicNotServed.
        """
        self.check_served()
        await self.quota.admit(claim, new_port)
        session = await let_in(
            self.producers, claim, new_port, self._store_epoch, partial(self._ready_for, claim)
        )
        session.pushed = self.deduplication.begin(session.name, self.ledger.appending.unconfirmed())
        return session

    async def _ready_for(self, claim: Claim) -> None:
        """Raises while nobody may be let in; who is to be alone comes in the place of the others."""
        await self.deduplication.ready()
        if not ACCESS_MODES[claim.access_mode].alone:
            others = (one for one in self.producers if one.active and one.name != claim.name)
            self.limits.check_room("max_producers", lambda: sum(1 for _ in others))

    async def _store_epoch(self) -> int:
        """The topic's next epoch, once it is durable: whoever has an older one stays shut out, whatever broker it asks."""

        async def change() -> int:
            epoch = self.ledger.list.record.topic_epoch + 1
            await self.ledger.list.commit(topic_epoch=epoch)
            self.producers.topic_epoch = epoch  # also if its claim was withdrawn meanwhile
            return epoch

        return await self.ledger.changes.edit(change)

    def producer_left(self, session: ProducerSession, *, lost: bool) -> None:
        """The listener lets go of a session. `lost`: it was not closed by its producer, which may come back."""
        self.producers.forget(session, self._grace_ends() if lost else 0.0)

    def _grace_ends(self) -> float:
        """When those who have not come back until then lose their place to who waits (loop time)."""
        return self._loop.time() + self._settings.exclusive_grace_ms / 1000

    def publish(self, session: ProducerSession, groups: AdmittedGroups, *, whole: bool = False) -> None:
        """Queues verified batches; receipts come through the session's port when they are durable.

        Each batch is a group of its own, or (`whole`) all of them are one group, which is stored in one entry. A session
        that failed or was closed drops what comes. Callers stop reading while `publish_budget.full`.
        """
        if session.state is not SessionState.OPEN or not groups.batches:
            return
        totals = measure(groups)
        if totals.size > self.limits.unchecked_bytes and (found := self.limits.first_refused(groups)):
            fitting, sequence_id, error = found
            self.publish(session, fitting.part(0, 0) if whole else fitting)
            session.fail(sequence_id if not whole else groups.sequence_ids[0], error)
            return
        if totals.size > self._settings.max_group_bytes or totals.messages > MAX_MESSAGES_PER_BATCH:
            refused = first_too_large(groups, totals, self._settings.max_group_bytes, whole=whole)
            if refused is not None:
                fitting, sequence_id, error = refused
                self.publish(session, fitting)
                session.fail(sequence_id, error)
                return
        pushed = session.pushed
        if pushed is not None:
            first = groups.sequence_ids[0]
            if not totals.consecutive or first <= pushed.last:
                self._store_what_is_new(session, pushed, groups, whole=whole)
                return
            pushed.last = first + totals.messages - 1
        self._store(session, groups, totals, whole=whole)

    def _store_what_is_new(
        self, session: ProducerSession, pushed: Pushed, groups: AdmittedGroups, *, whole: bool
    ) -> None:
        """Decides for each group; those that are new and in a row are stored together."""
        start, ends = 0, [len(groups.batches)] if whole else range(1, len(groups.batches) + 1)
        begin = 0  # of the group
        for end in ends:
            first = groups.sequence_ids[begin]
            extensions = None if groups.extensions is None else groups.extensions.get(begin)
            chunk = None if extensions is None else extensions.chunk
            try:
                new = pushed.take(first, groups.last_sequence_id(end - 1), chunk)
            except SequenceIdError as error:
                self._store_part(session, groups.part(start, begin), whole=whole)
                session.fail(first, error)
                return
            if not new:
                self._store_part(session, groups.part(start, begin), whole=whole)
                self._owe(session, first, sum(groups.counts[begin:end]))
                start = end
            begin = end
        self._store_part(session, groups.part(start, begin), whole=whole)

    def _store_part(self, session: ProducerSession, part: AdmittedGroups, *, whole: bool) -> None:
        if part.batches and session.state is SessionState.OPEN:
            self._store(session, part, measure(part), whole=whole)

    def _owe(self, session: ProducerSession, sequence_id: int, messages: int) -> None:
        """Receipts of duplicates come behind all that is outstanding, so that their originals are durable then."""
        self.deduplication.duplicates += messages
        answered = self._answered_entries
        newest = self._coalescer.newest or self.ledger.appending.newest
        if newest is None or newest.receipted:
            if not answered or answered[-1][3].receipted:
                answered.append((*DUPLICATE_ID[:2], None, GatheredEntry(), True))
            newest = answered[-1][3]
        runs = newest.runs
        if runs and runs[-1].is_duplicate and runs[-1].ends_before(session, sequence_id):
            runs[-1].messages += messages
        else:
            runs.append(ReceiptRun(session, sequence_id, messages, NOT_STORED))
            session.outstanding += 1
            self.publish_budget.charge(DUPLICATE_BYTES)
            newest.size += DUPLICATE_BYTES  # which are released with it
        self._append_soon()

    def _store(
        self, session: ProducerSession, groups: AdmittedGroups, totals: Totals, *, whole: bool
    ) -> None:
        if groups.extensions is not None:
            refusal = self.delays.refused(groups, lambda: self.subscriptions.lowest_mark, whole=whole)
            if refusal is not None:
                position, failure = refusal
                self._store_part(session, groups.part(0, position), whole=False)
                session.fail(groups.sequence_ids[position], failure)
                return
            self.delays.queued_messages += groups.delayed_messages
        self._coalescer.add(session, groups, totals, whole=whole)
        if self.limits.publish is not None:
            self.limits.queued(session)
        self.publish_budget.charge(totals.size)
        self.messages_in += totals.messages
        self.bytes_in += totals.size
        session.messages_in += totals.messages
        session.bytes_in += totals.size
        counters = self._components.published
        counters.runs_in += 1
        counters.messages_in += totals.messages
        counters.bytes_in += totals.size
        if not self._append_scheduled:
            self._append_soon()

    def _append_soon(self) -> None:
        if not self._append_scheduled:
            self._append_scheduled = True
            self._loop.call_soon(self._append)

    def _append(self) -> None:
        """Ends a loop turn: sends receipts for answered entries, then appends entries while the ledger takes them."""
        self._append_scheduled = False
        if self._answered_entries:
            self._send_receipts()
        appending, coalescer = self.ledger.appending, self._coalescer
        ledger = self.ledger.takes
        while coalescer:
            if not ledger.accepting:
                ledger.wake()
                return
            if coalescer.first.delayed and self.name.persistent and not self.delays.ready():
                return
            if self.limits.publish is not None and not self.limits.may_append():
                return
            entry = coalescer.take()
            now, entry.appended_s = appending.now_ms(), self._loop.time()
            self._components.published.entries_in += 1
            ledger.append(entry.encode(ledger.next_message, now), entry.messages, now, entry)

    def _confirmed(self, ledger_id: int, entry_id: int, data: bytes | None, entry: GatheredEntry) -> None:
        self.states.confirmed(ledger_id, entry_id, entry)
        if entry.delayed:
            self.delays.queued_messages -= sum(count for _, count, _ in entry.delayed)
        self._answered_entries.append((ledger_id, entry_id, data, entry, True))
        self._append_soon()

    def _leaving(self, info: LedgerInfo, end: Position) -> None:
        """A segment of the ring leaves, whoever has not read it."""
        for subscription in list(self.subscriptions.values()):
            subscription.lose(info, end)

    def _delays_known(self) -> None:
        self.subscriptions.delays_known()
        self._append_soon()

    def _delays_due(self, runs: list[Run]) -> None:
        self.subscriptions.released(runs)

    def _accepted(self, ledger_id: int, entry_id: int, entry: GatheredEntry) -> None:
        """flush=async: its producers get their receipts now, and consumers get the entry when it is confirmed."""
        self._answered_entries.append((ledger_id, entry_id, None, entry, False))
        self._append_soon()

    def _send_receipts(self) -> None:
        """Sends receipts for all answered entries, one call per producer; then those that are confirmed are dispatched.

        A broker that may not be the owner any more sends none (rule 31): its topics are about to be fenced.
        """
        if not self._components.ownership.valid:
            return
        answered, self._answered_entries = self._answered_entries, []
        sessions: dict[int, ProducerSession] = {}
        released, now_s = 0, self._loop.time()
        cached = len(self.readers) > 0
        for ledger_id, entry_id, data, entry, confirmed in answered:
            if not entry.receipted:
                entry.receipted = True
                if entry.appended_s:  # it is of producers
                    self.receipted_entries += 1
                    self.publish_s += now_s - entry.appended_s
                for run in entry.runs:
                    session = run.session
                    if not session.rows:
                        sessions[id(session)] = session
                    if run.index >= 0:
                        session.rows.append((run.sequence_id, run.messages, ledger_id, entry_id, run.index))
                    else:
                        session.rows.append((run.sequence_id, run.messages, *DUPLICATE_ID[:3]))
            if confirmed:
                released += entry.size
                for run in entry.runs:
                    if run.index >= 0:
                        run.session.confirmed_chunk = None if run.extensions is None else run.extensions.chunk
            if cached and data is not None:
                self.cache.put((ledger_id, entry_id), Entry(data, LEDGER_ENTRY_HEADER_BYTES))
        self.cache.drop_what_nobody_holds(self.readers.slowest_from)
        for session in sessions.values():
            rows, session.rows = session.rows, []
            # Of a CLOSED session, too: its producer, which opens again on the same connection, need not send these again.
            session.receipts(rows)
            self.producers.finished(session, len(rows))
        self._release(released)
        self.readers.notify()

    def _release(self, size: int) -> None:
        self.publish_budget.release(size)
        if self._drained is not None and not self.publish_budget.used and not self._drained.done():
            self._drained.set_result(None)

    # --- maintenance -------------------------------------------------------------------------------------------------

    def _ledgers_changed(self) -> None:
        self.subscriptions.ledgers_changed()

    def maintain(self) -> None:
        """One round of maintenance."""
        if self.in_use:
            self.used_at = self._loop.time()
        self.subscriptions.restore_cursors()
        self.states.restore()
        self.delays.maintain(self.log.normalise((0, 0, 0))[0])
        self.deduplication.forget()
        if self.name.persistent:
            self.maintenance.round(None if self._export is None else self._export.staging)

    def count_rates(self) -> None:
        """Called every few seconds."""
        now, out = self._loop.time(), self.dispatched
        if self.rates.due(now):
            counters = self.messages_in, self.bytes_in, out.messages_out, out.bytes_out, out.dropped_messages
            self.rates.look(now, counters)
        for session in self.producers:
            session.rates.look(now, (session.messages_in, session.bytes_in))
        for subscription in self.subscriptions.values():
            subscription.count_rates(now)

    @property
    def degraded(self) -> bool:
        """Its open ledger has fewer copies than the policies say, because there were too few bookies for it."""
        opened = self.ledger.appending.open_ledger
        return opened is not None and opened.degraded

    @property
    def in_use(self) -> bool:
        """False if unloading the topic now would disturb nobody."""
        return bool(
            len(self.producers)
            or self.producers.waiting
            or self.subscriptions.consumers
            or self.publish_budget.used
            or self._tasks
            or self._leases.count()
            or self.compaction.running
            or (self._export is not None and len(self._export.staging))
        )

    # --- ending ------------------------------------------------------------------------------------------------------

    def check_served(self) -> None:
        if self.not_served is not None:
            raise self.not_served

    def fence(self, error: MagnetarError) -> None:
        """Nothing is confirmed any more when this returns, and nothing is written; `end` releases the rest.

        The first reason counts: for a topic that is being unloaded this ends the wait for queued entries, and its users
        still learn where the topic goes.
        """
        self._fenced = True
        served, self.not_served = self.not_served is None, self.not_served or error
        self._fail_queued(error)
        if served:
            self.producers.close_all(error)
            self._on_fenced(self)

    def _delayed(self, error: MagnetarError) -> None:
        """Nothing can be stored for now: producers that wait for receipts learn why, so that they can give up."""
        for session in self.producers:
            session.delay(error)

    def _fail_queued(self, error: MagnetarError) -> None:
        """Fails what is queued, or appended and not confirmed: each producer learns its first sequence id that failed."""
        if self._answered_entries:
            self._send_receipts()
        # Left over if the ownership is in doubt. Entries that are only accepted are among those that the ledger abandons.
        unsent, self._answered_entries = self._answered_entries, []
        entries = [entry for *_, entry, confirmed in unsent if confirmed]
        entries += self.ledger.appending.abandon() + self._coalescer.clear()
        released = sum(entry.size for entry in entries)
        if receipted := [entry for entry in entries if entry.receipted]:
            _log.warning(
                "topic %s: %d messages that were acknowledged (flush=async) are not known to be on disk: %s; its next owner "
                "finds those that its bookies have", self.name, sum(entry.messages for entry in receipted), error,
            )  # fmt: skip
            entries = [entry for entry in entries if not entry.receipted]
        runs = [run for entry in entries for run in entry.runs]
        for run in runs:
            run.session.fail(run.sequence_id, error)
        for run in runs:
            self.producers.finished(run.session, 1)
        self._release(released)

    async def end(self, error: MagnetarError | None = None, *, drain_s: float = 0.0) -> None:
        """Releases the topic, whatever ended it; called once. Nothing of it is left, or under way, when this returns.

        Unless the topic was fenced before, `error` says why it ends, and by its detail `url` where it goes; queued entries
        are waited for, at most `drain_s`. Cursors are written concurrently, then the ledger list. Producers and consumers
        are notified last: what was still to be written here would be fenced off by the next owner, whom they ask then.
        """
        if self.not_served is None and error is not None:
            self.not_served = error
            self.producers.stop(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._until_drained()
            self._fail_queued(error)
        assert self.not_served is not None
        consumers: list[Consumer] = []
        self.delays.stop()
        self.limits.stop()
        try:
            await self.quota.stop()
            await self.deduplication.stop()
            consumers, _ = await asyncio.gather(
                self.subscriptions.close(self.not_served, fenced=self._fenced),
                self.states.close(fenced=self._fenced),
            )
            self.cache.clear()
            await self._tasks.wait()
            if self._export is not None:
                await self._export.stop(self.not_served)
            await self.compaction.stop()
            await self.ledger.close()
            if self._export is not None:
                await self._export.attachments.stop()
            await self.maintenance.stop()
        finally:
            self.policies.stop()
            self.producers.close_all(self.not_served)
            notify_closed(consumers, self.not_served)

    async def probe_users(self) -> None:
        """Pings all producers and consumers; those whose connections are dead have left when this returns."""
        await probe([user.port.peer for user in (*self.producers, *self.subscriptions.consumers)])

    def check_unused(self) -> None:
        """Raises TopicInUse while producers or consumers are connected."""
        producers = len(self.producers) + self.producers.waiting
        consumers = len(self.subscriptions.consumers)
        if producers or consumers:
            raise TopicInUse(
                f"topic {self.name} has {producers} producer(s) and {consumers} consumer(s); "
                "close them or use force"
            )

    async def delete(self) -> None:
        """Ends the topic, and deletes all that it holds. Raises TopicNotServed if it was fenced just before."""
        if self.not_served is not None:  # fenced while it is DELETING: the registry leaves `end` to this call
            await self.end()
            raise self.not_served
        export = self.export
        self.fence(TopicNotFound(f"topic {self.name} was deleted"))
        await self.end()
        await self.ledger.changes.mark_deleting()
        await self._delete_rest(export)

    async def _delete_rest(self, export: TopicExport) -> None:
        metadata = self._components.metadata
        for name in await metadata.children(cursors_path(self.name)):
            await self.ledger.cursor(name).delete()
        await self.states.delete()
        await export.staging.delete_all()
        await self._components.creation.forget(self.name)
        await self.ledger.changes.delete()
