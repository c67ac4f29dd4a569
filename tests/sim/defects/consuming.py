"""Defects of consuming: in the broker's dispatch, its cursors, and the consumers of the client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.broker.cursors.core.acks import INDEX_BITS, AckState, Position
from magnetar.broker.cursors.core.range_blocks import RangesOfLedger
from magnetar.client.dead_letters import DeadLetters
from magnetar.client.messages import Message
from magnetar.client.topic.acknowledger import Acknowledger
from magnetar.client.topic.consumer import TopicConsumer
from magnetar.client.topic.window import Window
from magnetar.proto.ranges import Range
from sim.defects.registry import standalone_defect
from support.dispatch_defects import PLANTS

# Those of the dispatch core that a whole service shows as well.
OF_DISPATCH = (
    "hand_over_without_draining",
    "two_active_consumers",
    "takeover_does_not_go_back",
    "due_nack_forgotten_at_unload",
    "redelivery_count_forgotten",
    "set_aside_for_ever",
)


def _planted(name: str) -> None:
    def plant() -> None:
        PLANTS[name](pytest.MonkeyPatch())

    plant.__name__ = name
    standalone_defect(plant)


for _name in OF_DISPATCH:
    _planted(_name)


@standalone_defect
def hole_dropped_on_reload() -> None:
    """Rule 32: what was acknowledged beyond the mark-delete position is forgotten when the topic is loaded again."""
    merge = AckState.merge

    def forgetful(self: AckState, mark_delete: Position, rows: Iterable[RangesOfLedger]) -> None:
        merge(self, mark_delete, ())

    AckState.merge = forgetful  # type: ignore[method-assign]


@standalone_defect
def part_of_an_entry_dropped_on_reload() -> None:
    """Rule 32: of an entry that is acknowledged in part nothing is known any more when the topic is loaded again."""
    merge = AckState.merge
    entry_numbers = 1 << INDEX_BITS

    def whole(first: int, last: int) -> Range:
        return -(-first // entry_numbers) * entry_numbers, (last + 1) // entry_numbers * entry_numbers - 1

    def forgetful(self: AckState, mark_delete: Position, rows: Iterable[RangesOfLedger]) -> None:
        kept: list[RangesOfLedger] = []
        for ledger, starts, ends in rows:
            ranges = [(first, last) for first, last in map(whole, starts, ends) if first <= last]
            kept.append((ledger, [first for first, _ in ranges], [last for _, last in ranges]))
        merge(self, mark_delete, kept)

    AckState.merge = forgetful  # type: ignore[method-assign]


@standalone_defect
def permit_leaked_at_disconnect() -> None:
    """The consumer counts what it had granted on the connection that broke, and grants too little on the next one."""
    Window.reset = lambda self: None  # type: ignore[method-assign]


@standalone_defect
def dead_letter_acknowledged_before_it_is_durable() -> None:
    """A letter that is lost with its consumer is not delivered again."""
    letters: Any = DeadLetters

    async def bury_one(self: Any, consumer: TopicConsumer, message: Message) -> None:
        await consumer.acknowledger.ack(message, receipt=True)
        await asyncio.sleep(2.0)
        await self._send_dead(message, self._properties(message))

    letters._write_dead_letter = bury_one


@standalone_defect
def epoch_not_checked_after_a_seek() -> None:
    """Rule 30: what was sent before the seek is handed out after it."""
    consumer: Any = TopicConsumer
    delivered = consumer._delivered

    def any_epoch(self: Any, command: Any, payload: bytes) -> None:
        delivered(self, replace(command, consumer_epoch=max(command.consumer_epoch, self._epoch)), payload)

    consumer._delivered = any_epoch
    consumer._drop_stale = lambda self: None


@standalone_defect
def nacks_forgotten_by_the_client() -> None:
    """What waits for its time in the client is never asked for."""
    acknowledger: Any = Acknowledger
    acknowledger._schedule_redelivery = lambda self: None
