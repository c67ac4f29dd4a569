"""Gathers the groups of one loop turn, from whichever producers, into entries: group commit for messages.

Sans-I/O. `add` takes a run of batches as parallel lists and costs no bytecode per message; `take` hands over the oldest
entry to append. While the ledger's pipeline is full nothing is taken, and what arrives goes on to be gathered: entries grow
to `max_entry_bytes` under load, and a lone send waits for nothing.

Receipts are *runs*: (session, first sequence id, messages, first index in the entry). A run covers groups of one producer
whose sequence ids count up without a gap, which is checked by comparing two lists in C (35 ns a batch).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from magnetar.proto.admission import AdmittedGroups
from magnetar.proto.batch_extensions import BatchExtensions
from magnetar.proto.entry import ENTRY_DELAYED, encode_entry
from magnetar.proto.errors import InvalidArgument, MagnetarError, MessageTooLarge
from magnetar.proto.ids import MAX_MESSAGES_PER_BATCH

from ..dispatch.core.delay_index import DelayedRun, add_run
from .core.producers import ProducerSession

ROW_BYTES = 10  # of the entry's table, per batch
# The header length of an entry is 16 bits wide; names are at most 255 characters of 1 to 4 bytes and their msgpack prefix.
MAX_NAME_BYTES = 60_000
NOT_STORED = -1


@dataclass(slots=True, eq=False)
class ReceiptRun:
    """`messages` messages of a session from `sequence_id` on, stored from `index` of the entry on.

    Or a run of duplicates, which are not stored: its receipt only waits for the entry.
    """

    session: ProducerSession
    sequence_id: int
    messages: int
    index: int  # NOT_STORED: duplicates
    extensions: BatchExtensions | None = None  # of a batch whose ids do not count up: it is a run of its own

    @property
    def is_duplicate(self) -> bool:
        """Its messages are not in the entry."""
        return self.index == NOT_STORED

    def ends_before(self, session: ProducerSession, sequence_id: int) -> bool:
        """True if that message of that session follows."""
        return (
            self.session is session
            and self.sequence_id + self.messages == sequence_id
            and self.extensions is None
        )


class GatheredEntry:
    """An entry in the making: parallel lists of batches, counts and producer numbers, and the receipts it owes."""

    __slots__ = (
        "_name_bytes",
        "_names",
        "_numbers",
        "appended_s",
        "batches",
        "counts",
        "delayed",
        "flags",
        "messages",
        "producers",
        "receipted",
        "runs",
        "size",
    )

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.counts: list[int] = []
        self.producers: list[int] = []
        self.runs: list[ReceiptRun] = []
        self.appended_s = 0.0  # loop time; 0: no producer sent it
        self.receipted = False  # its producers have their receipts
        self.messages = 0
        self.size = 0  # bytes of batches and their rows
        self.flags = 0  # of the entry
        self.delayed: list[DelayedRun] = []  # its messages with a delivery time
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._name_bytes = 0

    def fits(
        self, session: ProducerSession, messages: int, size: int, max_messages: int, max_bytes: int
    ) -> bool:
        """True if that much more of `session` may go into this entry."""
        return (
            self.size + size <= max_bytes
            and self.messages + messages <= max_messages
            and (session.name in self._numbers or self._name_bytes < MAX_NAME_BYTES)
        )

    def add(self, session: ProducerSession, groups: AdmittedGroups, totals: Totals) -> int:
        """Appends a run; returns how many receipt runs it began."""
        batches, counts, _, extensions = groups
        number = self._numbers.get(session.name)
        if number is None:
            number = self._numbers[session.name] = len(self._names)
            self._names.append(session.name)
            self._name_bytes += 4 * len(session.name) + 5
        self.batches += batches
        self.counts += counts
        self.producers += [number] * len(batches)
        if extensions is not None:
            self._note(counts, extensions)
        begun = self._add_runs(session, groups, totals)
        self.messages += totals.messages
        self.size += totals.size
        return begun

    def _note(self, counts: list[int], extensions: dict[int, BatchExtensions]) -> None:
        for one in dict.fromkeys(extensions.values()):
            self.flags |= one.entry_flags
        if self.flags & ENTRY_DELAYED:
            firsts = list(accumulate(counts, initial=self.messages))
            for position, one in extensions.items():
                if one.deliver_at_ms is not None:
                    add_run(self.delayed, firsts[position], counts[position], one.deliver_at_ms)

    def _add_runs(self, session: ProducerSession, groups: AdmittedGroups, totals: Totals) -> int:
        runs = self.runs
        if totals.consecutive:
            first = groups.sequence_ids[0]
            if runs and runs[-1].ends_before(session, first) and not runs[-1].is_duplicate:
                runs[-1].messages += totals.messages
                return 0
            runs.append(ReceiptRun(session, first, totals.messages, self.messages))
            return 1
        # Sequence ids that the application chose, with gaps, or that chunks share: a run ends at each.
        begun, index = 0, self.messages
        extensions = groups.extensions or {}
        for position, (count, sequence_id) in enumerate(zip(groups.counts, groups.sequence_ids)):
            irregular = extensions.get(position)
            if irregular is not None and not irregular.has_ids:
                irregular = None
            if begun and irregular is None and runs[-1].ends_before(session, sequence_id):
                runs[-1].messages += count
            else:
                runs.append(ReceiptRun(session, sequence_id, count, index, irregular))
                begun += 1
            index += count
        return begun

    def encode(self, first_index: int, append_time_ms: int) -> bytes:
        """The entry's bytes; the batches are let go, the runs stay for the receipts."""
        data = encode_entry(
            self.batches,
            self.counts,
            self.producers,
            self._names,
            first_index=first_index,
            append_time_ms=append_time_ms,
            flags=self.flags,
        )
        self.batches = []
        self.counts = []
        self.producers = []
        return data


class Totals(NamedTuple):
    """What `measure` counted."""

    messages: int
    size: int  # bytes in the entry
    consecutive: bool  # sequence ids count up from the first one, message by message


def measure(groups: AdmittedGroups) -> Totals:
    """Of a run."""
    batches, counts, sequence_ids, extensions = groups
    expected = list(accumulate(counts, initial=sequence_ids[0]))
    messages = expected.pop() - sequence_ids[0]
    consecutive = expected == sequence_ids and not (
        extensions is not None and any(one.has_ids for one in dict.fromkeys(extensions.values()))
    )
    return Totals(messages, sum(map(len, batches)) + ROW_BYTES * len(batches), consecutive)


def first_too_large(
    groups: AdmittedGroups, totals: Totals, max_bytes: int, *, whole: bool
) -> tuple[AdmittedGroups, int, MagnetarError] | None:
    """If a group is more than an entry can hold: the groups before the first such, its sequence id, and why."""
    batches, _, sequence_ids, _ = groups
    error: MagnetarError
    if whole and totals.messages > MAX_MESSAGES_PER_BATCH:
        error = InvalidArgument(
            f"a group of {totals.messages} messages exceeds what an entry can hold ({MAX_MESSAGES_PER_BATCH}); "
            "send it as several"
        )
        return groups.part(0, 0), sequence_ids[0], error
    for position, size in enumerate([totals.size] if whole else map(len, batches)):
        if size > max_bytes:
            error = MessageTooLarge(
                f"{size} bytes exceed max_message_bytes ({max_bytes}); send less at once or raise the setting"
            )
            return groups.part(0, position), sequence_ids[position], error
    return None


class Coalescer:
    """The queue in front of a topic's ledger."""

    __slots__ = ("_entries", "_max_bytes", "_max_messages")

    def __init__(self, max_entry_bytes: int) -> None:
        self.limit(MAX_MESSAGES_PER_BATCH, max_entry_bytes)
        self._entries: list[GatheredEntry] = []  # max_topic_publish_bytes of them at most: a few

    def limit(self, max_messages: int, max_bytes: int) -> None:
        """What entries gather from now on: more than that only as one group."""
        self._max_messages = min(max_messages, MAX_MESSAGES_PER_BATCH)
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def queued_bytes(self) -> int:
        """What waits here."""
        return sum(entry.size for entry in self._entries)

    @property
    def newest(self) -> GatheredEntry | None:
        """The last entry in the queue."""
        return self._entries[-1] if self._entries else None

    def add(self, session: ProducerSession, groups: AdmittedGroups, totals: Totals, *, whole: bool) -> None:
        """Queues a run. `whole`: it is one group, which is never divided into several entries."""
        entries = self._entries
        if not entries or not entries[-1].fits(
            session, totals.messages, totals.size, self._max_messages, self._max_bytes
        ):
            if not whole and (totals.size > self._max_bytes or totals.messages > self._max_messages):
                self._add_divided(session, groups)
                return
            entries.append(GatheredEntry())
        session.outstanding += entries[-1].add(session, groups, totals)

    def _add_divided(self, session: ProducerSession, groups: AdmittedGroups) -> None:
        """A run too large for one entry: each of its batches is a group, so it may be cut behind each of them."""
        batches, counts, *_ = groups
        start, messages, size = 0, 0, 0
        for position, batch in enumerate(batches):
            more = len(batch) + ROW_BYTES
            if position > start and (
                size + more > self._max_bytes or messages + counts[position] > self._max_messages
            ):
                self._add_part(session, groups.part(start, position))
                start, messages, size = position, 0, 0
            messages += counts[position]
            size += more
        self._add_part(session, groups.part(start, len(batches)))

    def _add_part(self, session: ProducerSession, part: AdmittedGroups) -> None:
        entry = GatheredEntry()
        self._entries.append(entry)
        session.outstanding += entry.add(session, part, measure(part))

    @property
    def first(self) -> GatheredEntry:
        """The oldest entry."""
        return self._entries[0]

    def sessions(self) -> list[ProducerSession]:
        """Whose groups are queued, each once."""
        return list(dict.fromkeys(run.session for entry in self._entries for run in entry.runs))

    def take(self) -> GatheredEntry:
        """The oldest entry; the caller appends it."""
        return self._entries.pop(0)

    def clear(self) -> list[GatheredEntry]:
        """Everything that is queued, to be failed."""
        entries, self._entries = self._entries, []
        return entries
