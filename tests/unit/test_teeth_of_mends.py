"""Defects that were mended once, planted again: the test that is named for each must notice it.

The simulations cannot notice these: they come from a peer that sends what no client sends, from a record that nobody of ours
writes, or from a step that a seed would have to hit between two turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import tempfile
from collections.abc import Awaitable, Callable

import pytest

from magnetar.bookie import adds
from magnetar.bookie.scrub import repair_queue
from magnetar.broker.cursors import cursor, pointer, snapshot_ledger
from magnetar.broker.listeners.native import ports
from magnetar.broker.topics import subscriptions
from magnetar.broker.topics.core.producers import Producers, ProducerSession
from magnetar.ledger.replication import auditor
from support.bookie_kit import open_inline
from support.index_model import ModelStorage
from support.virtual_time import in_virtual_time
from unit.bookie import test_impossible_ids, test_repair_queue
from unit.broker import test_cursor, test_endings_of_topics, test_one_writer, test_producers
from unit.ledger.replication import test_unreadable_request

_FAILED = (
    Exception,
    pytest.fail.Exception,
)  # an assertion, a time that is up, or something expected that did not come


class Never(Exception):
    """Nothing raises it: an `except` of it is as good as none."""


def every_id_is_believed(planted: pytest.MonkeyPatch) -> None:
    """An add is acknowledged whatever its ids, and the next flush stops the bookie."""
    planted.setattr(adds, "MAX_ENTRY_ID", 2**64)
    planted.setattr(adds, "MAX_LEDGER_ID", 2**64)


def an_unreadable_request_ends_the_audit(planted: pytest.MonkeyPatch) -> None:
    """One node of the queue that cannot be read leaves all ledgers behind it unqueued."""
    planted.setattr(auditor, "InvalidArgument", Never)


def an_unreadable_node_is_tried_for_ever(planted: pytest.MonkeyPatch) -> None:
    """The bookie's queue of damage never becomes empty."""
    planted.setattr(repair_queue, "DataDirectoryError", Never)


def receipts_are_one_frame(planted: pytest.MonkeyPatch) -> None:
    """They are too large for a producer that negotiated small frames, and its session ends."""
    planted.setattr(ports, "FrameTooLarge", Never)


def a_failing_port_ends_the_turn(planted: pytest.MonkeyPatch) -> None:
    """The receipts of other producers stay, and so do their bytes in the budget."""
    planted.setattr(ProducerSession, "receipts", lambda session, rows: session.port.receipts(rows))


def a_cursor_ignores_fencing(planted: pytest.MonkeyPatch) -> None:
    """It takes the fence for an ordinary failure, and rolls over."""
    for module in (cursor, snapshot_ledger):
        planted.setattr(module, "LedgerFenced", Never)


def a_closing_topic_admits_producers(planted: pytest.MonkeyPatch) -> None:
    """One that waited for its predecessor is let in, and its sends wait for ever."""
    planted.setattr(Producers, "stopped", property(lambda _: None, lambda *_: None), raising=False)


def a_write_of_a_pointer_is_left_behind(planted: pytest.MonkeyPatch) -> None:
    """By a caller who is cancelled."""

    async def finish(work: Awaitable[object]) -> object:
        return await work

    planted.setattr(pointer, "finish", finish)


def a_deletion_is_left_behind(planted: pytest.MonkeyPatch) -> None:
    """By a caller who is cancelled, and lets go of the lock."""
    planted.setattr(subscriptions, "finish", asyncio.shield)


async def ids_are_bounded() -> None:
    with tempfile.TemporaryDirectory() as folder:
        bookie = await open_inline(folder + "/b", ModelStorage())
        try:
            await test_impossible_ids.test_rule_47_an_add_with_impossible_ids_is_refused(
                bookie, recovery=False
            )
        finally:
            with contextlib.suppress(Exception):
                await bookie.close()


async def other_ledgers_are_queued(caplog: pytest.LogCaptureFixture) -> None:
    await test_unreadable_request.test_a_request_that_cannot_be_read_does_not_stop_the_audit(b"\xc1", caplog)


async def the_queue_of_damage_becomes_empty(caplog: pytest.LogCaptureFixture) -> None:
    test = (
        test_repair_queue.test_rule_48_a_node_that_cannot_be_read_costs_its_ledger_and_is_not_tried_for_ever
    )
    await test(b"\xc1", caplog)


async def a_deletion_waits_for_the_write_of_its_cursor() -> None:
    await test_one_writer.at_any_moment("seek", "delete", lost=False)


async def a_subscription_is_made_anew_once_its_deletion_is_over() -> None:
    await test_one_writer.at_any_moment("unsubscribe", "subscribe", lost=True)


async def a_failing_port_costs_its_own_producer(caplog: pytest.LogCaptureFixture) -> None:
    await test_producers.test_rule_48_a_port_that_fails_costs_its_own_producer_only(caplog)


TEETH: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[..., Awaitable[None]]]] = [
    (every_id_is_believed, ids_are_bounded),
    (an_unreadable_request_ends_the_audit, other_ledgers_are_queued),
    (an_unreadable_node_is_tried_for_ever, the_queue_of_damage_becomes_empty),
    (receipts_are_one_frame, test_producers.test_rule_42_receipts_fit_the_frames_of_a_peer_with_small_ones),
    (a_failing_port_ends_the_turn, a_failing_port_costs_its_own_producer),
    (
        a_cursor_ignores_fencing,
        test_cursor.test_rules_34_and_52_a_fenced_cursor_ledger_ends_its_owner_before_it_answers,
    ),
    (
        a_closing_topic_admits_producers,
        test_endings_of_topics.test_a_closing_topic_does_not_admit_a_producer_that_waited_for_its_predecessor,
    ),
    (a_write_of_a_pointer_is_left_behind, a_deletion_waits_for_the_write_of_its_cursor),
    (a_deletion_is_left_behind, a_subscription_is_made_anew_once_its_deletion_is_over),
]


@pytest.mark.parametrize(("plant", "test"), TEETH, ids=[plant.__name__ for plant, _ in TEETH])
def test_a_planted_defect_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None],
    test: Callable[..., Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with_log = "caplog" in inspect.signature(test).parameters
    plant(monkeypatch)

    @in_virtual_time
    async def run() -> None:
        async with asyncio.timeout(60):
            await test(*[caplog] * with_log)

    with pytest.raises(_FAILED):
        run()
