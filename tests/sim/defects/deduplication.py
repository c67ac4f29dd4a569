"""Defects of deduplication (rule 27), for the scenarios `once` and `once_standalone`.

What a client that keeps to the protocol never meets, a duplicate of what is still on its way, say, is the matter of
`tests/unit/broker/test_deduplication.py`. To lose the changes of a failed write would do no harm here: a ledger that failed
takes nothing more, and a state without one is written as a whole. `tests/unit/broker/test_log_state.py` notices it.
"""

from __future__ import annotations

from typing import Any

from magnetar.broker.topics import deduplication as module
from magnetar.broker.topics import log_state
from magnetar.broker.topics.core.deduplication import KnownProducers, Pushed
from magnetar.broker.topics.deduplication import Deduplication
from magnetar.broker.topics.log_state import StoredLogState
from magnetar.client.topic.consumer import TopicConsumer
from sim.defects.registry import once_defect

stored: Any = StoredLogState
deduplication: Any = Deduplication
known: Any = KnownProducers
consumer: Any = TopicConsumer


@once_defect
def snapshot_without_its_position() -> None:
    """What is stored counts for the log as it is when it is read."""
    recover = stored._recover

    async def latest(self: Any) -> Any:
        await recover(self)
        return self._ledger.list.end[:2]

    stored._recover = latest


@once_defect
def position_taken_after_awaiting() -> None:
    """Entries that are confirmed while a change is written count as written."""

    async def write(self: Any) -> None:
        store, unwritten = self._store, self._unwritten
        if self._snapshot_due or not store.has_room:
            self._snapshot_due = True
            await store.replace()
        for piece in list(self._state.changes()):
            await store.append(log_state._encode(log_state._Record(None, piece)), 1)
        place = self._place
        await store.append(log_state._encode(log_state._Record(place, b"")), 1)
        self._snapshot_due = False
        self._durable = place
        self._unwritten -= unwritten

    stored._write = write


@once_defect
def failed_persist_leaves_pushed_ahead() -> None:
    """Pulsar #5218: what was taken and never stored is a duplicate when it comes again, to the same broker."""
    begin = deduplication.begin
    left: dict[tuple[int, str, str], Pushed] = {}

    def remembered(self: Any, name: str, unconfirmed: Any = ()) -> Any:
        pushed = begin(self, name, unconfirmed)
        key = (id(self._settings), str(self._topic), name)
        if pushed is not None:
            pushed.last = max(pushed.last, left.setdefault(key, pushed).last)
            left[key] = pushed
        return pushed

    deduplication.begin = remembered


@once_defect
def last_entry_is_not_replayed() -> None:
    """The log is read up to the last entry, not with it."""
    replay = deduplication.replay

    def held_back(self: Any, ledger_id: int, entry_id: int, entry: Any) -> None:
        before = getattr(self, "held_back", None)
        self.held_back = (ledger_id, entry_id, entry)
        if before is not None:
            replay(self, *before)

    deduplication.replay = held_back


@once_defect
def session_begins_with_nothing() -> None:
    """Only what one session sends twice is noticed."""
    known.begin = lambda self, name, unconfirmed=(): Pushed(-1, None)


@once_defect
def entries_behind_a_seek_change_places() -> None:
    """What is put into the queue of a key_shared consumer after a seek goes before the last one that waits there."""
    seek, enqueue = consumer.seek, consumer._enqueue
    sought: set[int] = set()

    async def noted(self: Any, *given: Any, **named: Any) -> Any:
        if self._options.type == "key_shared":  # of the ordered types other rules notice it
            sought.add(id(self))
        return await seek(self, *given, **named)

    def careless(self: Any, delivery: Any) -> None:
        before = len(self._queue)
        enqueue(self, delivery)
        if id(self) in sought and 0 < before < len(self._queue):
            self._queue.insert(before - 1, self._queue.pop())

    consumer.seek, consumer._enqueue = noted, careless


@once_defect
def chunk_counts_as_a_message() -> None:
    """The first chunk says that its message is stored."""
    find = module._last_and_chunk
    module._last_and_chunk = lambda *given: (find(*given)[0], None)
