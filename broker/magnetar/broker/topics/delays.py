"""Delayed messages of one topic: the index of those that wait, its durable form, its clock, its limits.

    OFF       nothing is stored, and nothing waits: costs nothing
      --a batch with a delivery time is published--> OPENING: its entry, and all behind it, wait until the state is stored
      --the topic is loaded, and something is stored--> READING: entries are appended; what may be delayed is not dispatched
    OPENING, READING   --the index follows the log (`log_state`)--> ON
    ON        rows come when their entries are confirmed, in that very call: no dispatch comes between
      --nothing waits any more, in two rounds of maintenance--> OFF

So a broker that dies leaves no delayed message behind that the next one does not know of: the position that is stored lies
before the first of them. What is stored are rows of the index. Of what is read back the rows that are due are left out: the
read positions of all subscriptions are before them then. A piece stays true: what is released is due, and what is trimmed
nobody asks for.

The timer looks at the wall clock, at least once a second, since that may jump; what is due is released together with what
becomes due within `delayed_delivery_tick_ms`. While the policy `delayed_delivery` is off everything is due. A defect in here
ends the topic on this broker: its next owner makes the index of what is stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator

from magnetar.proto.admission import AdmittedGroups
from magnetar.proto.batch_extensions import entry_extensions
from magnetar.proto.entry import ENTRY_DELAYED, Entry
from magnetar.proto.errors import (
    InvalidArgument,
    MagnetarError,
    ServiceNotReady,
    TooManyRequests,
    TopicNotServed,
)
from magnetar.proto.policy_table import BY_POLICY
from magnetar.runtime.clock import Clock
from magnetar.runtime.quantities import counted, format_duration
from magnetar.runtime.tasks import TaskSet

from ..cursors.core.acks import Position, number_of
from ..dispatch.core.delay_index import DelayedRun, DelayIndex, Run, add_run
from .coalescer import GatheredEntry
from .log_state import LogStates, StoredLogState
from .policies import Resolved

_log = logging.getLogger(__name__)

KIND = "delays"
EVERY_ENTRIES, INTERVAL_MS = 1_000, 120_000  # as for other states of a log
_COST_OF_A_ROW = 4  # to read it back, in rows of a cursor: other topics have their turn after 1,024, 0.2 ms
_BETWEEN_SWEEPS_S = 0.01
_PAUSE_S = 0.001
_FOR_EVER_MS = 1 << 52  # as a time: after any delivery time
_LONGEST_WAIT_S = 1.0


class TopicDelays:
    """See the module docstring. `stop` in the end."""

    def __init__(
        self,
        states: LogStates,
        policies: Callable[[], Resolved | None],
        clock: Clock,
        tasks: TaskSet,
        known: Callable[[], None],
        waits: Callable[[MagnetarError], None],
        released: Callable[[list[Run]], None],
        fence: Callable[[MagnetarError], None],
    ) -> None:
        """`known` is called when the index is whole, `waits` if that lasts, `released` with what is due."""
        self._states = states
        self._policies = policies
        self._clock = clock
        self._tasks = tasks
        self._known = known
        self._waits = waits
        self._released = released
        self._fence = fence
        self._loop = asyncio.get_running_loop()
        self.index: DelayIndex | None = None  # None: OFF
        self.whole = True  # False while OPENING, READING
        self._stored: StoredLogState | None = None
        self._reading = False
        self._opening: asyncio.Task[None] | None = None
        self._dropping: asyncio.Task[None] | None = None
        self._stored_until = (-1, 0)  # rows up to here are in pieces
        self.queued_messages = 0  # delayed ones that are not confirmed
        self._was_empty = False  # in the last round of maintenance
        self._timer: asyncio.Handle | None = None
        self._timer_ms = 0  # what it waits for
        self._swept_s = 0.0
        self._ended = False

    # --- on and off --------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Something is stored: it is read in the background."""
        self._reading = True
        self._open()

    def ready(self) -> bool:
        """True if an entry with delayed messages may be appended; else `known` is called when it may."""
        if self._stored is None and self._opening is None:
            self._open()
        return self._reading or self.whole

    def _open(self) -> None:
        self.index, self.whole = DelayIndex(), False
        self._opening = self._tasks.begin(self._open_state(), "reading the index of delayed messages")

    async def _open_state(self) -> None:
        try:
            if self._dropping is not None:
                await asyncio.wait([self._dropping])
            if self._ended:
                return
            self._stored = await self._states.open(
                KIND, self, every_entries=EVERY_ENTRIES, interval_ms=INTERVAL_MS
            )
            try:
                self._stored.check()
            except ServiceNotReady as error:
                self._waits(error)
            if await self._stored.opened():
                self.whole = True
                self._arm()
                self._known()
        finally:
            self._opening = None

    def maintain(self, first_ledger: int) -> None:
        """The regular round. `first_ledger`: that the topic has."""
        if self._stored is None or self.index is None or not self.whole:
            return
        self.index.drop_below(first_ledger)
        empty = not self.index and not self.queued_messages
        if empty and self._was_empty:
            self.index = self._stored = None
            self._reading = False
            self._dropping = self._tasks.begin(self._drop(), "dropping the index of delayed messages")
        self._was_empty = empty

    async def _drop(self) -> None:
        try:
            await self._states.drop(KIND)
        except MagnetarError as error:  # then it says less than it could, and nothing wrong
            _log.info("the index of delayed messages stays where it is stored: %s", error)

    def stop(self) -> None:
        """The topic ends; `LogStates` stores what is to be stored."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()

    def messages_from(self, position: Position) -> int:
        """How many messages at a position or behind it wait for their time."""
        return 0 if self.index is None else self.index.messages_from(position[0], number_of(position))

    # --- limits ------------------------------------------------------------------------------------------------------

    def refused(
        self, groups: AdmittedGroups, lowest: Callable[[], Position], *, whole: bool
    ) -> tuple[int, MagnetarError] | None:
        """The position of the first batch that is beyond a limit, and why.

        `lowest`: where what is not acknowledged begins.
        """
        policies = self._policies()
        if groups.extensions is None or policies is None:
            return None
        longest_ms, longest_of = policies.value("max_delivery_delay_ms")
        most, most_of = policies.value("max_delayed_messages")
        if not longest_ms and not most:
            return None
        now_ms = self._clock.now_ms()
        room = most - self.queued_messages - (0 if self.index is None else self.index.messages)
        if most and self.index is not None and room < groups.delayed_messages:
            # What every subscription is done with does not count.
            room = most - self.queued_messages - self.messages_from(lowest())
        for position, extensions in groups.extensions.items():
            due_ms = extensions.deliver_at_ms
            if due_ms is None:
                continue
            room -= groups.counts[position]
            if longest_ms and due_ms - now_ms > longest_ms:
                return 0 if whole else position, InvalidArgument(
                    f"a delivery time lies {(due_ms - now_ms) / 1000:,.1f} s ahead, and the {longest_of} allows "
                    f"{format_duration(longest_ms)} (policy max_delivery_delay_ms, --max-delivery-delay): deliver it "
                    "sooner, or raise the policy"
                )
            if most and room < 0:
                return 0 if whole else position, TooManyRequests(
                    f"{counted(most, 'message')} of the topic wait for their delivery time, as many as the {most_of} allows "
                    "(policy max_delayed_messages, --max-delayed-messages); this is tried again until some of them are "
                    "due, or the policy is raised"
                )
        return None

    # --- LogState ----------------------------------------------------------------------------------------------------

    def confirmed(self, ledger_id: int, entry_id: int, context: GatheredEntry) -> None:
        """Dispatch may look at the entry from now on."""
        if context.delayed and self.index is not None:
            self.index.add((ledger_id, entry_id), context.delayed, context.messages)
            self._arm()

    def replay(self, ledger_id: int, entry_id: int, entry: Entry) -> None:
        """An entry of the log that is read back."""
        assert self.index is not None
        key = (ledger_id, entry_id)
        if entry.flags & ENTRY_DELAYED and not self.index.withheld(key):
            now_ms = self._now_ms()
            runs: list[DelayedRun] = []
            for position, extensions in entry_extensions(entry).items():
                due_ms, first = extensions.deliver_at_ms, entry.batch_start_index(position)
                if due_ms is not None and due_ms > now_ms:
                    add_run(runs, first, entry.end_indexes[position] - first, due_ms)
            if runs:
                self.index.add(key, runs, entry.message_count)

    def clear(self) -> None:
        """Empty."""
        self.index = DelayIndex()
        self._stored_until = (-1, 0)

    def apply(self, piece: bytes) -> Iterable[int]:
        """Rows of a piece, but for those that are due."""
        assert self.index is not None
        for rows in self.index.apply(piece, self._now_ms()):
            yield _COST_OF_A_ROW * rows

    def pieces(self) -> Iterator[bytes]:
        """All rows."""
        return iter(()) if self.index is None else self.index.pieces()

    def changes(self) -> Iterable[bytes]:
        """Rows that came since the last call, and are not released."""
        if self.index is None:
            return ()
        after, self._stored_until = self._stored_until, max(self._stored_until, self.index.last)
        return self.index.pieces(after)

    def needed_since_ms(self) -> int:
        """All of the log."""
        return 0

    # --- time --------------------------------------------------------------------------------------------------------

    def _now_ms(self) -> int:
        """What has a delivery time until then is due."""
        return self._clock.now_ms() if self._policy("delayed_delivery") else _FOR_EVER_MS

    def _policy(self, policy: str) -> int:
        """While policies are not known delivery times are heeded."""
        policies = self._policies()
        found: int = BY_POLICY[policy].default if policies is None else policies.value(policy)[0]
        return found

    def _arm(self) -> None:
        """Sets the timer, unless it is set for an earlier time."""
        next_ms = None if self.index is None or not self.whole else self.index.next_ms
        if next_ms is None or self._ended or (self._timer is not None and self._timer_ms <= next_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = next_ms
        wait_s = min((next_ms - self._now_ms()) / 1000, _LONGEST_WAIT_S)
        at_s = max(
            self._loop.time() + wait_s, self._swept_s + self._policy("delayed_delivery_tick_ms") / 1000
        )
        self._timer = self._loop.call_at(at_s, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        if self.index is None or self._ended:
            return
        self._swept_s = self._loop.time()
        try:
            runs, more = self.index.take_due(self._now_ms())
            if runs:
                self._released(runs)
            if more and not self._ended:
                # What is only spread is ahead of its time: others are served meanwhile, who need several turns of the loop.
                self._timer, self._timer_ms = self._loop.call_later(0 if runs else _PAUSE_S, self._sweep), 0
            else:
                self._arm()
        except Exception as error:
            _log.exception("delayed messages cannot be released")
            self._fence(TopicNotServed(f"delayed messages cannot be released here: {error!r}"))
