"""The transport in one process: adds wait for a bookie whose write cache is full."""

import asyncio

from magnetar.ledger import LocalTransport
from magnetar.proto.errors import (
    BookieUnavailable,
    ConnectionLost,
    LedgerFenced,
    RequestTimeout,
    TooManyRequests,
)
from magnetar.proto.ledger_entry import encode_ledger_entry
from support.bookies import FakeBookie


class Answers:
    """Collects add callbacks."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, int, int]] = []

    def __call__(self, bookie: str, ledger_id: int, entry_id: int, code: int) -> None:
        self.heard.append((bookie, ledger_id, entry_id, code))


def send(transport: LocalTransport, entry_id: int, done: Answers, *, bookie: str = "b") -> None:
    entry = encode_ledger_entry(1, entry_id, -1, 3, b"abc")
    transport.add(bookie, entry, 1, entry_id, recovery=False, done=done)


async def test_adds_wait_in_order_while_the_bookie_takes_none() -> None:
    bookie, done = FakeBookie("b"), Answers()
    transport = LocalTransport({"b": bookie})
    send(transport, 0, done)
    bookie.accepting = False
    for number in range(1, 4):
        send(transport, number, done)
    await asyncio.sleep(0.01)
    assert done.heard == [("b", 1, 0, 0)]
    assert bookie.adds == 1
    real_add = bookie.add

    def one_only(entry: bytes, *, recovery: bool, done: object) -> None:
        bookie.accepting = False  # the room was for one
        real_add(entry, recovery=recovery, done=done)  # type: ignore[arg-type]

    bookie.add = one_only  # type: ignore[method-assign,assignment]
    for room in range(1, 4):
        bookie.accepting = True
        send(transport, 3 + room, done)  # never overtakes those that wait
        for callback in list(bookie.on_accepting):
            callback()
        assert bookie.adds == 1 + room
    await asyncio.sleep(0)
    assert [entry_id for _, _, entry_id, _ in done.heard] == [0, 1, 2, 3]
    await transport.close()
    await asyncio.sleep(0)
    assert done.heard[4:] == [("b", 1, number, ConnectionLost.code) for number in range(4, 7)]
    assert bookie.on_accepting == []


async def test_a_bookie_that_never_gets_room_is_a_failed_one() -> None:
    bookie, done = FakeBookie("b"), Answers()
    transport = LocalTransport({"b": bookie}, add_timeout_s=0.02)
    bookie.accepting = False
    send(transport, 0, done)
    assert done.heard == [], "never from within add"
    while not done.heard:
        await asyncio.sleep(0.001)
    assert done.heard == [("b", 1, 0, RequestTimeout.code)], "after four add timeouts, as over TCP"
    bookie.accepting = True
    send(transport, 1, done)
    await asyncio.sleep(0)
    assert done.heard[1:] == [("b", 1, 1, 0)]
    await transport.close()


async def test_what_is_held_is_bounded_and_a_stranger_is_unavailable() -> None:
    bookie, done = FakeBookie("b"), Answers()
    transport = LocalTransport({"b": bookie})
    bookie.accepting = False
    entry = encode_ledger_entry(1, 0, -1, 64 << 20, bytes(64 << 20))
    for number in range(5):
        transport.add("b", entry, 1, number, recovery=False, done=done)
    send(transport, 9, done, bookie="c")
    await asyncio.sleep(0)
    # Four of them would be 256 MiB and four headers.
    assert done.heard == [
        ("b", 1, 3, TooManyRequests.code),
        ("b", 1, 4, TooManyRequests.code),
        ("c", 1, 9, BookieUnavailable.code),
    ]
    await transport.close()


async def test_a_readd_of_a_recovery_is_not_answered_for_the_add_of_a_stale_writer() -> None:
    bookie, stale, recovery = FakeBookie("b"), Answers(), Answers()
    bookie.fenced[1] = None
    transport = LocalTransport({"b": bookie})
    entry = encode_ledger_entry(1, 0, -1, 3, b"abc")
    transport.add("b", entry, 1, 0, recovery=False, done=stale)
    transport.add("b", entry, 1, 0, recovery=True, done=recovery)
    await asyncio.sleep(0.01)
    assert (stale.heard, recovery.heard) == ([("b", 1, 0, LedgerFenced.code)], [("b", 1, 0, 0)])
    await transport.close()


async def test_another_bookie_by_the_same_name_owes_nothing_for_its_predecessor() -> None:
    first, second, done = FakeBookie("b"), FakeBookie("b"), Answers()
    bookies = {"b": first}
    transport = LocalTransport(bookies)
    first.hold()
    send(transport, 0, done)
    bookies["b"] = second
    send(transport, 1, done)
    await asyncio.sleep(0.01)
    assert done.heard == [("b", 1, 0, ConnectionLost.code), ("b", 1, 1, 0)]
    first.release()
    await asyncio.sleep(0.01)
    assert len(done.heard) == 2
    await transport.close()
    assert first.on_accepting == second.on_accepting == []
