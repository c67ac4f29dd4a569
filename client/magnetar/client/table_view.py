"""Table view: the last value of each key of a topic, in memory, kept up to date by a reader.

The reader gets what compactions left and then the tail (`read_compacted`), from the beginning. Each message sets the value
of its key, and one without a value deletes the key; messages without a key are passed over. After a lost connection the
reader goes on behind the last message that it handed out, so the view only stands still meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator

from magnetar.proto.errors import AlreadyClosed, FinalError, MagnetarError
from magnetar.proto.ids import MessageId
from magnetar.runtime.tasks import begin, report

from .chunked_id import last_place
from .member import Member
from .messages import MessageBatch
from .receipts import copy_of
from .receiving import Receiving
from .topic.consumer import TopicConsumer
from .topics_consumer import TopicsConsumer

_log = logging.getLogger(__name__)

Listener = Callable[[str | bytes, bytes | None], object]
# A compaction may have passed over the message that a refresh waits for: the end is asked for again after so long.
ASK_AGAIN_S = 1.0


class TableView(Member):
    """The topic as a table. Made by `Client.create_table_view`.

    A key is its bytes: "a" and b"a" are the same one. Iterating gives keys as they were sent last. Nothing bounds the view
    but the number of keys: `len` and `size_bytes` say how large it is. Looking at it never waits.
    """

    def __init__(self, topic: str, consumer: TopicConsumer | TopicsConsumer) -> None:
        super().__init__(topic, consumer)
        self._consumer = consumer
        self._reader = Receiving(topic, consumer)
        self._entries: dict[bytes, tuple[str | bytes, bytes]] = {}
        self._size = 0
        self._applied: dict[str, MessageId] = {}  # by topic: the last message that is in the view
        self._task: asyncio.Task[None] | None = None
        self._ended: MagnetarError | None = None  # why it follows the topic no more
        self._complete = False  # the topic is terminated, and the view has all of it
        self._changed = (
            asyncio.Event()
        )  # replaced whenever it is set: something was applied, or nothing will be
        self._listeners: dict[int, Listener] = {}
        self._last_listener = 0

    async def _open(self) -> None:
        """Reads all that the topic has, and goes on following it."""
        await self._consumer.open()
        self._task = begin(self._follow(), f"the view of {self._consumer.what}", self._followed)
        await self.refresh()

    # --- the table ---------------------------------------------------------------------------------------------------

    def __getitem__(self, key: str | bytes) -> bytes:
        return self._entries[_as_bytes(key)][1]

    def get(self, key: str | bytes, default: bytes | None = None) -> bytes | None:
        """The value of a key; `default` if it has none."""
        found = self._entries.get(_as_bytes(key))
        return default if found is None else found[1]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str | bytes) and _as_bytes(key) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str | bytes]:
        return iter(self.keys())

    def keys(self) -> list[str | bytes]:
        """All keys of this moment, in the order in which they came."""
        return [key for key, _ in self._entries.values()]

    def values(self) -> list[bytes]:
        """Their values."""
        return [value for _, value in self._entries.values()]

    def items(self) -> list[tuple[str | bytes, bytes]]:
        """Keys with their values."""
        return list(self._entries.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all keys and values."""
        return self._size

    # --- following the topic -----------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Returns when the view has all messages that the topic has now.

        Raises why the view follows the topic no more, AlreadyClosed, and RequestTimeout when the service does not answer.
        """
        while True:
            self._check()
            wanted = await self._consumer.last_message_ids()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN_S):
                    while not all(self._has(topic, last) for topic, last in wanted.items()):
                        self._check()
                        await self._changed.wait()
                return

    def _has(self, topic: str, last: MessageId | None) -> bool:
        if last is None or (topic in self._applied and self._applied[topic] >= last):
            return True
        consumer = self._consumer.consumers.get(
            topic
        )  # what it has had may be chunks of a message that is not whole yet
        return consumer is not None and consumer.has_handed_out_to(last)

    def changes(self) -> AsyncGenerator[tuple[str | bytes, bytes | None], None]:
        """Keys with their new values, None for one that was deleted, from this call on. Ends when the view is closed,
        and at the end of a terminated topic.

        Whoever is slow gets only the last value of a key that changed several times. Raises as `refresh`.
        """
        pending: dict[bytes, tuple[str | bytes, bytes | None]] = {}

        def note(key: str | bytes, value: bytes | None) -> None:
            pending[_as_bytes(key)] = (key, value)

        forget = self.listen(note)
        changes = self._changes_of(pending, forget)
        weakref.finalize(changes, forget)  # one that is never iterated runs no `finally`
        return changes

    async def _changes_of(
        self, pending: dict[bytes, tuple[str | bytes, bytes | None]], forget: Callable[[], None]
    ) -> AsyncGenerator[tuple[str | bytes, bytes | None], None]:
        try:
            while True:
                while pending:
                    yield pending.pop(next(iter(pending)))
                if self._complete or isinstance(self._ended, AlreadyClosed):
                    return
                self._check()
                await self._changed.wait()
        finally:
            forget()

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener(key, value)` for each change from now on, None for a key that was deleted; returns what ends that.

        What the listener raises is logged.
        """
        self._last_listener += 1
        number = self._last_listener
        self._listeners[number] = listener

        def forget() -> None:
            self._listeners.pop(number, None)

        return forget

    def _check(self) -> None:
        if self._ended is not None:
            raise copy_of(self._ended)

    async def _follow(self) -> None:
        try:
            async for batch in self._reader.batches():
                self._apply(batch)
            if self._reader.reached_end:
                self._complete = True
                self._notify()
            else:
                self._end(AlreadyClosed(f"{self._consumer.what} is closed; open another one"))
        except MagnetarError as error:
            # A message that cannot be read, for one: the view would be wrong from here on.
            self._end(error)

    def _followed(self, task: asyncio.Task[None]) -> None:
        report(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._end(FinalError(f"{self._consumer.what} is followed no more: {defect!r}"))

    def _apply(self, batch: MessageBatch) -> None:
        for message in batch:
            key, value = message.key, message.value
            if key is not None:
                self._set(key, value)
        self._applied[batch[-1].topic] = last_place(batch[-1].id)
        self._notify()

    def _set(self, key: str | bytes, value: bytes | None) -> None:
        name = _as_bytes(key)
        before = self._entries.get(name)
        if before is not None:
            self._size -= len(name) + len(before[1])
        if value is not None:
            self._entries[name] = (key, value)
            self._size += len(name) + len(value)
        elif before is None:
            return
        else:
            del self._entries[name]
        for listener in list(self._listeners.values()):
            try:
                listener(key, value)
            except Exception:
                _log.exception("a listener of the %s failed", self._consumer.what)

    def _end(self, why: MagnetarError) -> None:
        self._ended = self._ended or why
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- leaving -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """See Member. What the view has can still be looked at."""
        await super().close()
        if self._task is not None:
            await asyncio.wait([self._task])

    def abort(self) -> None:
        """See Member."""
        super().abort()
        self._end(AlreadyClosed(f"{self._consumer.what} is closed; open another one"))


def _as_bytes(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key
