"""Receipts of messages sent: a group settles once for all its messages, a receipt is a number in it.

A receipt costs 40 bytes and no future of its own: those who await one share the group's. A group settles when all its
messages are stored, or when one cannot be; the ids of those before it stay valid.

>>> group = Group(first_sequence_id=5)
>>> group.message_count = 3
>>> group.confirm(2, 7, 0, 40), group.confirm(1, 7, 1, 0)
(False, True)
>>> group.message_id(1), group.message_id(2)
(MessageId(ledger=7, entry=0, index=41, partition=-1), MessageId(ledger=7, entry=1, index=0, partition=-1))
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import msgspec

from magnetar.proto.batch import EncodedBatches
from magnetar.proto.errors import InvalidArgument, MagnetarError
from magnetar.proto.ids import DUPLICATE_ID, NO_PARTITION, MessageId

# MessageId(...) runs Python code; this builds the same tuple in C: 107 instead of 170 ns.
_new_id = partial(tuple.__new__, MessageId)


_NOWHERE = (-1, 0, 0)


def copy_of(error: MagnetarError) -> MagnetarError:
    """To raise it more than once: every raise adds to an exception's traceback."""
    return type(error)(error.message, **error.details)


class Group:
    """Messages with rising sequence ids that settle together; in order with the groups before and after it.

    message_count is 0 while the group is open. sequence_ids: None where they count up from the first. `runs` holds (first
    message of the run, ledger, entry, index) with rising first messages, and covers the first `confirmed` messages; of those
    that the broker had before, the ledger is -1, and a run that it refused is in `refused`, with the error. settled:
    confirmed == message_count, or those that are not confirmed failed with `error`.
    """

    __slots__ = (
        "_future",
        "bytes",
        "confirmed",
        "deadline",
        "encoded",
        "error",
        "error_seen",
        "first_sequence_id",
        "message_count",
        "order",
        "partition",
        "refused",
        "runs",
        "sequence_ids",
        "settled",
    )

    def __init__(self, first_sequence_id: int, partition: int = NO_PARTITION) -> None:
        self.first_sequence_id = first_sequence_id
        self.partition = partition
        self.message_count = 0
        self.sequence_ids: Sequence[int] | None = None
        self.bytes = 0  # what it counts against the memory bound
        self.confirmed = 0
        self.deadline = 0.0  # loop time
        self.encoded: EncodedBatches | None = None  # kept until it settles, so that it can be sent again
        self.order: list[int] | None = None  # of the messages among those stored; None: as they were sent
        self.runs: list[tuple[int, int, int, int]] = []
        self.refused: dict[int, MagnetarError] = {}  # by the first message of the run
        self.settled = False
        self.error: MagnetarError | None = None
        self.error_seen = False  # somebody awaited a receipt and got it
        self._future: asyncio.Future[None] | None = None

    @property
    def next_sequence_id(self) -> int:
        """Of the first message that is not confirmed."""
        ids = self.sequence_ids
        return self.first_sequence_id + self.confirmed if ids is None else ids[self.confirmed]

    @property
    def last_sequence_id(self) -> int:
        """Of a closed group."""
        return self.sequence_id(self.message_count - 1)

    def sequence_id(self, number: int) -> int:
        """Of message `number` in the order in which they are stored."""
        return self.first_sequence_id + number if self.sequence_ids is None else self.sequence_ids[number]

    @property
    def whole(self) -> Group:
        """What its messages are a part of: itself, but for a chunk."""
        return self

    @property
    def extensions(self) -> dict[int, Any] | None:
        """Of its batch, beside what its columns say."""
        return None

    def confirm(self, message_count: int, ledger: int, entry: int, index: int) -> bool:
        """The next `message_count` messages are stored from (ledger, entry, index) on; True when that was the last.

        With ledger -1 they were stored before.
        """
        self.runs.append((self.confirmed, ledger, entry, index))
        self.confirmed += message_count
        if self.confirmed < self.message_count:
            return False
        self._settle()
        return True

    def refuse(self, error: MagnetarError) -> int:
        """The next batch is never stored; returns how many messages it has. Those behind it go on."""
        assert self.encoded is not None
        first, self.error = self.confirmed, error
        self.refused[first] = error
        count = self.encoded.batch_end(first) - first
        self.confirm(count, *_NOWHERE)
        return count

    def fail(self, error: MagnetarError) -> None:
        """The messages that are not confirmed fail with `error`."""
        self.error = error
        self._settle()

    def _settle(self) -> None:
        self.settled = True
        self.encoded = None
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def when_settled(self, callback: Callable[[], object]) -> None:
        """Calls it in a turn of the loop of its own once the group has settled, however it does."""
        if self.settled:
            asyncio.get_running_loop().call_soon(callback)
        else:  # the future may be cancelled, by who awaits it as well
            self._pending().add_done_callback(lambda _: self.when_settled(callback))

    def _pending(self) -> asyncio.Future[None]:
        if self._future is None or self._future.done():
            self._future = asyncio.get_running_loop().create_future()
        return self._future

    def __await__(self) -> Generator[Any, None, None]:
        """Waits until the group settles, however it does; one future for all who wait."""
        while not self.settled:
            try:
                yield from self._pending()
            except asyncio.CancelledError:
                # Cancelling a task cancels the future that it waits for, which is everybody's: only the task that
                # was meant gives up, the others go on with a new one.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise

    def message_id(self, index: int) -> MessageId:
        """Id of message `index` of a settled group. Raises what the group failed with."""
        if self.order is not None:
            index = self.order[index]
        if index >= self.confirmed:
            raise self.raisable_error()
        runs = self.runs
        run = runs[0] if len(runs) == 1 else runs[bisect_right(runs, (index + 1,)) - 1]
        if run[0] in self.refused:
            self.error_seen = True
            raise copy_of(self.refused[run[0]])
        if run[1] < 0:
            return DUPLICATE_ID._replace(partition=self.partition)
        return _new_id((run[1], run[2], run[3] + index - run[0], self.partition))

    def stored_ids(self, start: int = 0, end: int | None = None) -> list[MessageId | None]:
        """The id of each message [start, end) of a settled group, None for those that are not known to be stored."""
        end = self.message_count if end is None else end
        if self.order is not None:
            ids = self._ids_in_place(0, self.message_count)
            return [ids[place] for place in self.order[start:end]]
        return self._ids_in_place(start, end)

    def _ids_in_place(self, start: int, end: int) -> list[MessageId | None]:
        """Of the messages [start, end) in the order in which they are stored."""
        ids: list[MessageId | None] = []
        for (first, ledger, entry, index), behind in zip(
            self.runs, [*(run[0] for run in self.runs[1:]), self.confirmed]
        ):
            low, high = max(first, start), min(behind, end)
            if first in self.refused:
                ids += repeat(None, high - low)
            elif ledger < 0:
                ids += repeat(DUPLICATE_ID._replace(partition=self.partition), high - low)
            elif low < high:
                indexes = range(index + low - first, index + high - first)
                ids += map(_new_id, zip(repeat(ledger), repeat(entry), indexes, repeat(self.partition)))
        ids += [None] * (end - start - len(ids))
        return ids

    def raisable_error(self) -> MagnetarError:
        """The error, to raise."""
        error = self.error
        assert error is not None, "the group has not settled"
        self.error_seen = True
        return copy_of(error)


Part = tuple[Group, int, int]
"""Messages of a group: from the one on, up to the other."""


async def stored_ids(
    parts: Iterable[Part], failure: MagnetarError | None
) -> tuple[list[MessageId | None], MagnetarError | None]:
    """What `store_columns` returns, once all that was sent has settled."""
    ids: list[MessageId | None] = []
    for group, start, end in parts:
        if not group.settled:
            await group
        ids += group.stored_ids(start, end)
        if None in ids[start - end :]:
            group.error_seen = True
            failure = failure or group.error
    return ids, failure


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Await it for the MessageId of one message, or for the error that it failed with.

    `asyncio.gather(*receipts)` waits for several. `asyncio.wait` takes futures: `asyncio.ensure_future(receipt)` is one.
    """

    group: Group
    index: int

    @property
    def done(self) -> bool:
        """True once awaiting it does not wait."""
        return self.group.settled

    def result(self) -> MessageId:
        """The id once it is `done`, or raises what the message failed with; before that InvalidArgument."""
        if not self.group.settled:
            raise InvalidArgument(
                "the message is not confirmed yet; await its receipt, or look at `done` first"
            )
        return self.group.message_id(self.index)

    def add_done_callback(self, callback: Callable[[Receipt], object]) -> None:
        """Calls `callback(receipt)` in the event loop once `result()` says how it went; soon, if it does already."""
        self.group.when_settled(partial(callback, self))

    def __await__(self) -> Generator[Any, None, MessageId]:
        group = self.group
        if not group.settled:
            yield from group.__await__()
        return group.message_id(self.index)
