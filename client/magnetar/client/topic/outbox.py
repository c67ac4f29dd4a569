"""Groups of a producer that are closed and not settled: sans I/O, in order, ready to be sent again.

Invariants (`check`): sequence ids rise from `in_flight` through `unsent`, with gaps where a group failed or the application
chose them; `bytes` is the sum of the groups' bytes; groups settle in the order in which they were closed.

After a reconnect everything that is not confirmed is written again, also what the broker may have stored. With deduplication
it says so in its receipts; without, messages may be stored twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise

from magnetar.proto.errors import MagnetarError, MalformedFrame, MessageTooLarge, SendTimeout

from ..receipts import Group


class Outbox:
    """in_flight: written in the current epoch, unsent: not yet; each oldest first."""

    __slots__ = ("bytes", "delay_reason", "in_flight", "unsent")

    def __init__(self) -> None:
        self.in_flight: deque[Group] = deque()
        self.unsent: deque[Group] = deque()
        self.bytes = 0
        self.delay_reason = ""  # why the broker cannot store what is in flight, said since the last receipt

    def __bool__(self) -> bool:
        return bool(self.in_flight or self.unsent)

    @property
    def last(self) -> Group | None:
        """The youngest group."""
        if self.unsent:
            return self.unsent[-1]
        return self.in_flight[-1] if self.in_flight else None

    @property
    def first(self) -> Group | None:
        """The oldest group, the next to settle."""
        if self.in_flight:
            return self.in_flight[0]
        return self.unsent[0] if self.unsent else None

    def add(self, group: Group) -> None:
        """A group was closed."""
        self.unsent.append(group)
        self.bytes += group.bytes

    def next_unsent(self) -> Group:
        """The oldest group that is not written; it counts as in flight from now on."""
        group = self.unsent.popleft()
        self.in_flight.append(group)
        return group

    def rewind(self) -> None:
        """A new epoch begins: everything has to be written again."""
        self.delay_reason = ""
        self.unsent.extendleft(reversed(self.in_flight))
        self.in_flight.clear()

    def confirm(self, rows: Iterable[tuple[int, ...]]) -> int:
        """Receipt rows of the current epoch; returns the sequence id of the last message that is stored now, or -1.

        A row may cover a part of a group or several groups. Raises MalformedFrame for messages out of order, which must
        not happen: what was skipped would never be confirmed.
        """
        stored = -1
        groups = self.in_flight
        for sequence_id, count, ledger, entry, index in rows:
            while count and groups:
                group = groups[0]
                expected = group.next_sequence_id
                if sequence_id == expected:
                    step = min(count, group.message_count - group.confirmed)
                    if group.confirm(step, ledger, entry, index):
                        groups.popleft()
                        self.bytes -= group.bytes
                    if group.whole is group or group.whole.settled:
                        stored = group.sequence_id(group.confirmed - 1)
                elif sequence_id < expected:
                    # Of a group that was given up (send_timeout) while the broker stored it. Its ids rise, so that it has no
                    # more messages than there are ids up to the expected one.
                    step = min(count, expected - sequence_id)
                else:
                    raise MalformedFrame(
                        f"a receipt starts at message {sequence_id}, but {expected} is the next"
                    )
                sequence_id += step
                index += step
                count -= step
        return stored

    @property
    def why_delayed(self) -> str:
        """Why the broker cannot store what was sent, as a part of an error's text."""
        return f"; the broker cannot store messages for now: {self.delay_reason}" if self.delay_reason else ""

    def refuse(self, sequence_id: int, error: MagnetarError) -> tuple[Group, int] | None:
        """The batch in flight that begins with `sequence_id` is never stored: its group, and how many messages it has.

        All others are kept. None if batches before it in the group are not confirmed yet: these are stored. Their receipts
        come before the next epoch, in which the rest is written again, and refused again.
        """
        for position, group in enumerate(self.in_flight):
            if group.first_sequence_id <= sequence_id <= group.last_sequence_id:
                if sequence_id > group.next_sequence_id:
                    return None
                if group.whole is not group:
                    del self.in_flight[position]
                    self._fail(group, error)
                    return group, 1
                count = group.refuse(error)
                if group.settled:
                    del self.in_flight[position]
                    self.bytes -= group.bytes
                return group, count
        return None

    def fail_larger(self, max_bytes: int) -> list[Group]:
        """Fails the groups that are larger, which the broker refuses; the ones around them are kept."""
        failed = [
            group
            for group in (*self.in_flight, *self.unsent)
            if group.encoded and group.encoded.largest > max_bytes
        ]
        for group in failed:
            self._take_out(
                group, MessageTooLarge(f"a batch of {group.bytes} bytes exceeds what the broker takes now")
            )
        return failed

    def fail_begun(self, error: MagnetarError) -> list[Group]:
        """Fails what is left of the messages in chunks of which some are confirmed."""
        groups = (*self.in_flight, *self.unsent)
        failed = [group for group in groups if group.whole is not group and group.whole.runs]
        for group in failed:
            self._take_out(group, error)
        return failed

    def _take_out(self, group: Group, error: MagnetarError) -> None:
        if not group.settled:  # with another chunk of its message
            (self.in_flight if group in self.in_flight else self.unsent).remove(group)
            self._fail(group, error)

    def fail_all(self, error: MagnetarError) -> list[Group]:
        """Fails everything in order; returns what failed."""
        failed = [*self.in_flight, *self.unsent]
        self.in_flight.clear()
        self.unsent.clear()
        for group in failed:
            self._fail(group, error)
        return failed

    def expire(self, now: float, send_timeout: float) -> list[Group]:
        """Fails, in order, the groups whose deadline has passed."""
        expired: list[Group] = []
        for groups in (self.in_flight, self.unsent):
            while groups and groups[0].deadline <= now:
                group = groups.popleft()
                expired.append(group)
                written = "was sent, but not confirmed" if groups is self.in_flight else "could not be sent"
                self._fail(
                    group,
                    SendTimeout(
                        f"the message {written} within send_timeout={send_timeout:g} s"
                        + (
                            f"; whether it was stored is not known{self.why_delayed}"
                            if groups is self.in_flight
                            else self.why_delayed or "; is the service running?"
                        )
                    ),
                )
            if groups:
                break
        return expired

    def _fail(self, group: Group, error: MagnetarError) -> None:
        """The other chunks of the same message are of no use to anybody."""
        self.bytes -= group.bytes
        group.fail(error)
        if group.whole is not group:
            for groups in (self.in_flight, self.unsent):
                for other in [one for one in groups if one.whole is group.whole]:
                    groups.remove(other)
                    self.bytes -= other.bytes
                    other.fail(error)

    def check(self) -> None:
        """Asserts the invariants; for tests."""
        groups = [*self.in_flight, *self.unsent]
        assert self.bytes == sum(group.bytes for group in groups)
        assert not any(group.settled for group in groups)
        assert all(
            one.last_sequence_id < other.first_sequence_id or one.whole is other.whole
            for one, other in pairwise(groups)
        )
