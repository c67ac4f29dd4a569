"""Deduplication of one topic: its policy, and what is durable of each producer, as a state that follows from the log.

    OFF   --the policy says on-->  ON    with nothing known: what is stored from now on is known
    ON    --the policy says off--> OFF   what was known is deleted before it can be ON again
    OFF   --it is ON--> sessions that are open end, and come again at once
    ON    --a session is opened--> it begins with what is durable of its name; ServiceNotReady while that is being read

What is on its way of sessions that end when it is switched on is known when they come again. No producer is opened while
the policies are not known, while it is to be ON and is not yet, or while what was known is not deleted yet. What fails on
the way, by a defect too, is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator

from magnetar.proto.batch import decode_batch_header
from magnetar.proto.batch_extensions import BATCH_HEADER_BYTES, BatchExtensions, Chunk, batch_extensions
from magnetar.proto.entry import ENTRY_CHUNKED, ENTRY_PUBLISHED, Entry
from magnetar.proto.errors import MagnetarError, ServiceNotReady, TopicBusy
from magnetar.proto.ids import TopicName
from magnetar.runtime.tasks import Jobs

from .coalescer import NOT_STORED, GatheredEntry
from .components import Components
from .core.deduplication import KnownProducers, Pushed
from .core.producers import Producers
from .log_state import FIRST_TRY_S, LogStates, StoredLogState
from .policies import TopicPolicies

_log = logging.getLogger(__name__)

KIND = "deduplication"


class Deduplication:
    """See the module docstring; it is the `LogState` too. `load` before use, `stop` in the end."""

    def __init__(
        self,
        topic: TopicName,
        states: LogStates,
        producers: Producers,
        policies: TopicPolicies,
        components: Components,
    ) -> None:
        self._topic = topic
        self._states = states
        self._producers = producers
        self._policies = policies
        self._settings = settings = components.settings
        self._now_ms = components.clock.now_ms
        self._known = KnownProducers(
            settings.deduplication_producer_ttl_ms,
            settings.deduplication_max_producers,
            producers.__contains__,
        )
        self._opened: StoredLogState | None = None  # None: OFF
        self._found = False  # something is stored by a former owner, and neither opened nor deleted
        self._left_over = False  # something is stored that has to be deleted, for it was switched off
        self._jobs = Jobs(f"topic {topic}")
        self._stopped = False
        self.duplicates = 0  # messages, since the topic was loaded

    # --- the policy --------------------------------------------------------------------------------------------------

    async def load(self, stored: Iterable[str]) -> None:
        """Returns as `LogStates.open`, or after 5 s. `stored`: kinds of states that former owners of the topic left."""
        self._found = KIND in stored
        self.policies_changed()
        if self._wanted():
            await self._settled()

    async def _settled(self) -> None:
        """The policies are read, if they are being read, and followed; or FIRST_TRY_S have passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_TRY_S):
                await self._policies.wait()
                await self._jobs.wait()

    def policies_changed(self) -> None:
        """Perhaps it is to be on now, or off."""
        if self._stopped:  # what is stored is the next owner's
            return
        if self._opened is not None:
            self._opened.every_entries = self._snapshot_entries()
        if self._wanted() or self._opened is not None or self._found or self._left_over:
            self._jobs.begin("deduplication", self._follow_policy)

    def _wanted(self) -> bool | None:
        if not self._topic.persistent:  # nothing of it is durable
            return False
        found = self._policies.in_force()
        if found is None:
            return None
        wanted: bool = found.value("deduplication")[0]
        return wanted

    def _snapshot_entries(self) -> int:
        found = self._policies.in_force()
        name = "deduplication_snapshot_entries"
        entries: int = getattr(self._settings, name) if found is None else found.value(name)[0]
        return entries

    async def _follow_policy(self) -> None:
        settings = self._settings
        pause_ms = settings.retry_initial_ms
        while (wanted := self._wanted()) is not None:
            if not wanted and (self._opened is not None or self._found):
                self._opened, self._found, self._left_over = None, False, True
                for session in self._producers:
                    session.pushed = None
            try:
                if self._left_over:
                    await self._states.drop(KIND)
                    self._left_over = False
                elif wanted and self._opened is None:
                    self._opened = await self._states.open(
                        KIND,
                        self,
                        every_entries=self._snapshot_entries(),
                        interval_ms=settings.deduplication_snapshot_interval_ms,
                    )
                    self._found = False
                    if self._opened.following and self._producers.stopped is None:
                        again = TopicBusy(
                            f"topic {self._topic} deduplicates from now on; open the producer again"
                        )
                        grace_s = settings.exclusive_grace_ms / 1000
                        self._producers.resume(again, asyncio.get_running_loop().time() + grace_s)
                else:
                    return
            except Exception as error:
                _log.warning(
                    "topic %s: deduplication is not switched %s yet: %s",
                    self._topic, "on" if wanted else "off", error, exc_info=not isinstance(error, MagnetarError),
                )  # fmt: skip
                await asyncio.sleep(pause_ms / 1000)
                pause_ms = min(pause_ms * 2, settings.retry_max_ms)

    async def stop(self) -> None:
        """The policy is not followed any more; to be called before the states are closed."""
        self._stopped = True
        await self._jobs.cancel()

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Raises ServiceNotReady while it is not known whether it is on, or what a session would begin with.

        Policies that are being read, as after each change of them, and what follows from them are waited for, at most
        FIRST_TRY_S. What is left over might become the next owner's: nobody begins anew before it is deleted.
        """
        if self._opened is None and self._wanted() is not False:
            await self._settled()
        if self._opened is not None:
            self._opened.check()
        elif self._found or self._left_over or self._wanted():
            raise ServiceNotReady(
                f"what producers of topic {self._topic} have stored is read or deleted first; try again"
            )
        elif self._wanted() is None:  # what a session stores now would be unknown to those that come after it
            raise ServiceNotReady(
                f"the policies of topic {self._topic} are not known, and whether it deduplicates; try again"
            )

    def begin(self, name: str, unconfirmed: Iterable[GatheredEntry] = ()) -> Pushed | None:
        """Of a new session, after `ready`; None: OFF.

        `unconfirmed`: entries that are not durable. With flush=async they may have groups of that name, which older sessions
        have receipts for.
        """
        if self._opened is None:
            return None
        runs = (run for entry in unconfirmed for run in entry.runs)
        return self._known.begin(
            name,
            (
                _last_and_chunk(run.sequence_id, run.messages, run.extensions)
                for run in runs
                if run.session.name == name and not run.is_duplicate
            ),
        )

    @property
    def on(self) -> bool:
        """It is in force."""
        return self._opened is not None and self._opened.following

    def forget(self) -> None:
        """The regular round."""
        self._known.forget(self._now_ms())

    # --- LogState ----------------------------------------------------------------------------------------------------

    def confirmed(self, ledger_id: int, entry_id: int, context: GatheredEntry) -> None:
        """Work for each run of a producer in the entry."""
        now_ms = self._now_ms()
        for run in context.runs:
            if run.index != NOT_STORED:
                ids = _last_and_chunk(run.sequence_id, run.messages, run.extensions)
                self._known.stored(run.session.name, *ids, now_ms)

    def replay(self, ledger_id: int, entry_id: int, entry: Entry) -> None:
        """Looks at the last batch of each producer; at all batches if there are chunks among them.

        What jobs published came from no producer: the names of their tasks would push out those that may send again.
        """
        if entry.flags & ENTRY_PUBLISHED:
            return
        names, data, count = entry.producer_names, entry.data, entry.batch_count
        lasts: Iterable[int] = dict(zip(entry.producers, range(count))).values()
        for position in range(count) if entry.flags & ENTRY_CHUNKED else lasts:
            start, _ = entry.batch_bounds(position)
            header = decode_batch_header(data, start)
            extensions = None
            if header.header_length != BATCH_HEADER_BYTES:
                extensions = batch_extensions(data, header.header_length, start)
            ids = _last_and_chunk(header.sequence_id, header.message_count, extensions)
            self._known.stored(names[entry.producers[position]], *ids, entry.append_time_ms)

    def clear(self) -> None:
        """Of the names that are known."""
        self._known.clear()

    def apply(self, piece: bytes) -> Iterable[int]:
        """Rows of names."""
        return (self._known.apply(piece),)

    def pieces(self) -> Iterator[bytes]:
        """All names."""
        return self._known.pieces()

    def changes(self) -> Iterator[bytes]:
        """Names that stored something."""
        return self._known.changes()

    def needed_since_ms(self) -> int:
        """Who has stored nothing since then is forgotten."""
        return self._now_ms() - self._settings.deduplication_producer_ttl_ms


def _last_and_chunk(
    first: int, messages: int, extensions: BatchExtensions | None
) -> tuple[int, Chunk | None]:
    """The last sequence id of messages that count up, unless the extensions of their batch say another."""
    if extensions is None:
        return first + messages - 1, None
    last = extensions.last_sequence_id
    return first + messages - 1 if last is None else last, extensions.chunk
