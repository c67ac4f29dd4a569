"""The shell of `core.dispatcher`: owns its reads and its timer, and sends what it delivers.

Whatever happens, `run` is called, which carries out instructions until the core has none left. A defect in there costs this
subscription a pause, and nobody else anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, Protocol

from magnetar.proto.errors import MagnetarError, ServiceNotReady, StorageFailed
from magnetar.proto.ids import MAX_MESSAGES_PER_ENTRY
from magnetar.proto.ranges import Range
from magnetar.runtime.tasks import awaited

from ..cursors.core.acks import EntryKey, Position
from ..cursors.cursor import Cursor
from ..ownership.ownership import Ownership
from ..resources.budget import ByteBudget
from ..resources.rates import Throttle
from ..settings import BrokerSettings
from .core.consumer import Consumer, Delivery
from .core.dispatcher import Delays, DispatchCore
from .core.entry_source import Acks, DispatchCounters
from .core.entry_source import TopicLog as TopicLookups
from .core.instructions import (
    ActiveChanged,
    CancelReads,
    EndReached,
    Instruction,
    PassEntry,
    PassMessages,
    Read,
    ReportUnreadable,
    SkipEntry,
    Stop,
    TurnOver,
    WakeAt,
)
from .readers import Readers

_log = logging.getLogger(__name__)

P = ParamSpec("P")

MAX_INSTRUCTIONS_PER_TURN = 256


class TopicLog(TopicLookups, Protocol):
    """What dispatch and acknowledgements need of the topic."""

    async def read(self, ledger_id: int, first: int, *, max_bytes: int) -> list[bytes]:
        """Confirmed ledger entries from `first` on, at least one."""

    def is_known(self, ledger_id: int) -> bool:
        """False if the ledger was trimmed or is not of this topic."""

    def message_count(self, key: EntryKey) -> int | None:
        """Messages of an entry that is in memory."""

    async def read_message_count(self, key: EntryKey) -> int:
        """Messages of any entry. Raises MessageLost."""


class Dispatcher:
    """See the module docstring. `handle` for every event; `close` in the end."""

    def __init__(
        self,
        name: str,
        log: TopicLog,
        cursor: Cursor,
        settings: BrokerSettings,
        read_budget: ByteBudget,
        counters: DispatchCounters,
        readers: Readers,
        delays: Delays,
        ownership: Ownership,
    ) -> None:
        """`name` is for the log."""
        self._name = name
        self._log = log
        self._cursor = cursor
        self._settings = settings
        self._counters = counters
        self._readers = readers
        self._ownership = ownership
        self._loop = asyncio.get_running_loop()
        self._counts = cursor.redeliveries
        self.core = DispatchCore(
            log, cursor.state, self._counts, settings, read_budget, counters, delays, durable=cursor.durable
        )
        self._reads: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None  # the core's
        self._again: asyncio.Handle | None = None  # after a turn that was long enough, or a defect
        self._running = False
        # True: `_again` goes on, and nothing before it. Else every event would begin a turn of its own.
        self._turn_over = False
        self.skipped_entries = 0

    def look_at(self, log: TopicLog, acks: Acks) -> None:
        self._log = log
        self.core.look_at(log, acks)

    @property
    def read_position(self) -> Position:
        """Everything before it was delivered, or is acknowledged."""
        return self.core.read_position

    def handle(self, event: Callable[P, None], *given: P.args, **named: P.kwargs) -> None:
        """An event of the core, which is one of its methods, and what follows from it."""
        event(*given, **named)
        if self._counts.changed:
            self._cursor.redeliveries_changed()
        self.run()

    def run(self) -> None:
        """Carries out instructions until the core has none left. Never raises.

        A broker that may not be the owner any more delivers nothing: the next one may have given receipts since (rule 34),
        and this one's topics are about to be fenced.
        """
        # An instruction may have led here: the loop below goes on with what came of it.
        if self._running or self._turn_over:
            return
        self._running = True
        core, served = self.core, self._ownership.valid
        try:
            for _ in range(MAX_INSTRUCTIONS_PER_TURN):
                instruction = core.poll()
                if type(instruction) is Delivery:
                    if not served:
                        continue
                    try:
                        instruction.consumer.port.deliver(instruction)
                    except Exception:
                        self._delivery_failed(instruction.consumer)
                elif instruction is None:
                    if core.throttle is None or not self._has_credit(core.throttle):
                        break
                elif type(instruction) is TurnOver:
                    self._turn_over = True
                    self._run_at(self._loop.call_soon(self._run_again))
                    break
                else:
                    self._carry_out(instruction)
            else:
                self._run_at(self._loop.call_soon(self._run_again))
            if core.consumers:
                self._readers.moved(self, core.read_position[:2])
                if core.stop is Stop.NO_ENTRIES:
                    self._readers.wait(self)
            else:
                self._readers.left(self)
        except Exception:
            self._counters.failed()
            _log.exception("%s: dispatch failed; it is tried again", self._name)
            self._run_at(self._loop.call_later(self._settings.retry_max_ms / 1000, self._run_again))
        finally:
            self._running = False

    def _has_credit(self, throttle: Throttle) -> bool:
        """False: it does not wait for its rates, or these let it deliver more later, and then it goes on."""
        if self.core.stop is not Stop.THROTTLED:
            throttle.rest()
            return False
        wait_s = throttle.ready(self._loop.time())
        if wait_s > 0:
            self._run_at(self._loop.call_later(wait_s, self._run_again))
        return wait_s == 0

    def _run_at(self, again: asyncio.Handle) -> None:
        if self._again is not None:
            self._again.cancel()
        self._again = again

    def _run_again(self) -> None:
        self._again = None
        self._turn_over = False
        self.run()

    def _delivery_failed(self, consumer: Consumer) -> None:
        """A defect of its listener: what the consumer was to have goes to others, or to it when it comes again."""
        _log.exception("%s: consumer %s is closed, a delivery to it failed", self._name, consumer.name)
        if not consumer.closed:
            self.core.left(consumer)
            consumer.port.consumer_closed(ServiceNotReady("a delivery failed here; subscribe again"))

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Read(read_id):
                task = self._reads[read_id] = awaited(self._read(instruction))
                task.add_done_callback(lambda _: self._reads.pop(read_id))
            case CancelReads(read_ids):
                for read_id in read_ids:
                    self._reads[read_id].cancel()
            case WakeAt(due_ms):
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_at(due_ms / 1000, self._timer_due)
            case ActiveChanged(consumer, active):
                consumer.port.active_changed(active)
            case EndReached(consumer, epoch, redelivers):
                consumer.port.end_of_topic(epoch, redelivers)
            case PassEntry(key):
                self._cursor.pass_entry(*key)
            case PassMessages(key, ranges, count):
                self._ack(key, ranges, count)
            case SkipEntry(key, error):
                self._skip(*key, error)
            case ReportUnreadable(key, None):
                _log.info("%s no longer waits for entry %d:%d", self._name, *key)
            case ReportUnreadable(key, error):
                _log.warning(
                    "%s: entry %d:%d cannot be read, and is not skipped (unreadable_entry_policy, %s): %s",
                    self._name, *key, self._settings.unreadable_entry_policy, error,
                )  # fmt: skip

    def skipped(self, ledger: int, entry: int, error: MagnetarError) -> None:
        """A lost entry is acknowledged as a whole: counts that, and says so."""
        self._counters.skipped()
        self.skipped_entries += 1
        _log.warning("%s skips entry %d:%d, which is lost: %s", self._name, ledger, entry, error)

    def _skip(self, ledger: int, entry: int, error: MagnetarError) -> None:
        self.skipped(ledger, entry, error)
        # How many messages it has nobody knows: more than any entry makes it acknowledged as a whole.
        self._ack((ledger, entry), [(0, MAX_MESSAGES_PER_ENTRY - 1)], MAX_MESSAGES_PER_ENTRY)

    def _ack(self, key: EntryKey, ranges: Sequence[Range], count: int) -> None:
        self._cursor.ack(*key, [first for first, _ in ranges], [last for _, last in ranges], count)
        self._cursor.changed(None)

    # --- reads and the timer -----------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """The clock of the core's events."""
        return int(self._loop.time() * 1000)

    async def _read(self, read: Read) -> None:
        ledger, first = read.key
        try:
            entries = await self._log.read(ledger, first, max_bytes=read.max_bytes)
        except MagnetarError as error:
            self.handle(self.core.read_failed, read.read_id, error, self.now_ms())
        except Exception as error:
            _log.exception("%s: a read failed", self._name)
            failure = StorageFailed(f"the read failed: {error!r}")
            self.handle(self.core.read_failed, read.read_id, failure, self.now_ms())
        else:
            self.handle(self.core.read_done, read.read_id, entries, self.now_ms())
        for consumer, why, lost in self.core.to_notify(read.key):
            consumer.port.entry_unreadable(consumer.epoch, read.key, why, lost=lost)

    def _timer_due(self) -> None:
        self._timer = None
        # The clock of the loop may have been read a little early.
        self.handle(self.core.timer_due, self.now_ms() + 1)

    async def close(self, error: MagnetarError | None) -> list[Consumer]:
        """Ends reads; nothing is delivered any more. Consumers are notified of `error` now; None: by the caller, later."""
        consumers = list(self.core.consumers)
        self._turn_over = False
        self.handle(self.core.close)
        if error is not None:
            notify_closed(consumers, error)
        for timer in (self._timer, self._again):
            if timer is not None:
                timer.cancel()
        if self._reads:
            await asyncio.wait(list(self._reads.values()))
        return consumers


def notify_closed(consumers: Iterable[Consumer], error: MagnetarError) -> None:
    """They are closed, and look the topic up again."""
    for consumer in consumers:
        try:
            consumer.port.consumer_closed(error)
        except Exception:  # it costs this one alone
            _log.exception("consumer %s does not learn that it was closed", consumer.name)
