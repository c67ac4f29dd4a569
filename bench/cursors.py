"""What a cursor with 200,000 holes costs: a real bookie over TCP, fsync on, the embedded store, the cursor in this process.

    python -m bench cursors [--holes N] [--subscriptions N] [--json FILE]

For entries of one message of which every second one is acknowledged, and for entries of 1,000 messages of which every second
message is (in random order):
(1) made: the acknowledgements until so many holes stand, 1,000 before each flush.
(2) acknowledged: 10,000 holes more are closed, 10 before each flush, so with a receipt for every ten.
(3) rolled over: a whole snapshot to a new ledger.
(4) reloaded: as a broker does it that takes the topic over from one that was killed; the ledger is recovered on the way.
And (5): the cursors of N subscriptions, each with a ledger of its own, when their topic is taken over.

For each: seconds, CPU of this process for each acknowledgement, bytes given to the bookie, the longest turn of the loop by
the clock and by its CPU, resident memory that it took.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from bench.arguments import OUT, console, parser_of
from bench.takeover import QUORUMS, Port, opened, running_bookie
from bench.turns import longest_turn
from magnetar.broker import Broker, BrokerSettings
from magnetar.broker.cursors.core.acks import AckState, Position
from magnetar.broker.cursors.cursor import Cursor
from magnetar.broker.log.durability import Durability
from magnetar.proto.admission import admit_groups
from magnetar.proto.batch import encode_batch
from magnetar.proto.errors import TopicNotServed
from magnetar.proto.ids import TopicName
from magnetar.runtime.clock import SystemClock

CLOSED = 10_000
SHAPES = {"entries": 1, "parts": 1_000}  # messages of an entry


class _Topology:
    """One open ledger."""

    def normalise(self, position: Position) -> Position:
        """As it is."""
        return position


class _Port(Port):
    """A consumer that gets nothing, or a producer that waits for a receipt; both until their broker has lost the topic."""

    def consumer_closed(self, error: Exception) -> None:
        """See ConsumerPort, ProducerPort."""

    producer_closed = consumer_closed


class _Ledgers:
    """A ledger client whose appended bytes are counted."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.appended = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def create(self, **given: Any) -> Any:
        """A writer that counts."""
        writer = await self._inner.create(**given)
        append = writer.append

        def counted(payload: bytes, confirmed: Any) -> int:
            self.appended += len(payload)
            entry: int = append(payload, confirmed)
            return entry

        writer.append = counted
        return writer


class _Steps:
    def __init__(self, ledgers: _Ledgers, say: Any) -> None:
        self._ledgers = ledgers
        self._say = say
        self.lines: list[dict[str, Any]] = []

    async def step(self, name: str, count: int, work: Awaitable[Any]) -> None:
        """`count`: acknowledgements, or cursors."""
        gc.collect()
        gc.freeze()  # as a daemon that is ready does
        before, memory = self._ledgers.appended, _resident()
        _, turns = await longest_turn(work)
        line = {
            "step": name, "count": count, **turns._asdict(), "appended_bytes": self._ledgers.appended - before,
            "memory_bytes": _resident() - memory,
        }  # fmt: skip
        self.lines.append(line)
        self._say(
            f"{name:44}{count:9,}{turns.seconds:9.3f}{turns.cpu_s / count * 1e6:10.1f}"
            f"{line['appended_bytes'] / 1e3:13,.0f}{turns.longest_s * 1e3:10.1f}{turns.longest_cpu_s * 1e3:10.1f}"
            f"{line['memory_bytes'] / 1e6:9.1f}"
        )


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _shape(name: str, holes: int, store: Any, ledgers: _Ledgers, steps: _Steps) -> None:
    per_entry, settings = SHAPES[name], BrokerSettings(**QUORUMS)
    places = [divmod(2 * number + 1, per_entry) for number in range(holes)]
    random.Random(1).shuffle(places)

    def conflict(error: Exception) -> None:
        raise AssertionError(error)

    def cursor() -> Cursor:
        state = AckState(_Topology(), (1, 0, 0))
        return Cursor(
            f"/cursors/{name}", state, store, ledgers, settings, conflict, Durability(1, 1, 1).of_ledger
        )

    first = cursor()
    await first.create(1)

    async def acknowledge(places: Sequence[tuple[int, int]], together: int) -> None:
        for at in range(0, len(places), together):
            for entry, index in places[at : at + together]:
                first.ack(1, entry, (index,), (index,), per_entry)
            await first.flush()

    async def roll_over() -> None:
        first._snapshot_due = first._dirty = True
        await first.flush()

    await steps.step(f"{name}: made", holes, acknowledge(places, 1_000))
    closed = [
        divmod(2 * number, per_entry)
        for number in random.Random(2).sample(range(1, holes), min(CLOSED, holes // 2))
    ]
    await steps.step(f"{name}: acknowledged while they stand", len(closed), acknowledge(closed, 10))
    await steps.step(f"{name}: rolled over", 1, roll_over())
    await acknowledge([divmod(2 * holes + 2 * number + 1, per_entry) for number in range(CLOSED)], 1_000)
    second = cursor()

    async def reload() -> None:
        assert await second.adopt()
        await second.recover(_Topology())

    await steps.step(f"{name}: reloaded with {first.state.range_count:,} ranges", 1, reload())
    assert second.state.mark_delete == first.state.mark_delete
    assert second.state.range_count == first.state.range_count
    await first.close(fenced=True)
    await second.close()


async def _subscriptions(count: int, store: Any, ledgers: Any, steps: _Steps) -> None:
    name = TopicName.parse("bench")
    settings = BrokerSettings(**QUORUMS, maintenance_interval_s=1e6)
    old = Broker(store, ledgers, settings, SystemClock())
    await old.start()
    topic = await old.topic(name, create=True)
    port = _Port()
    session = await topic.open_producer("p", epoch=0, access_mode="shared", new_port=lambda _: port)
    topic.publish(session, admit_groups([encode_batch([b"x"] * 10, sequence_id=0, publish_time_ms=0)]))
    await port.received
    ledger = topic.ledger.list.ledgers[-1].ledger_id
    for number in range(count):
        consumer: Any = _Port()
        subscription, _, _ = await topic.subscribing.subscribe(
            f"s-{number}", consumer, type="shared", start=("earliest", None)
        )
        subscription.cursor.ack(ledger, 0, (3,), (3,), 10)
        await subscription.cursor.flush()
    topic.ledger.fence(TopicNotServed("the end of the old broker"))
    new = Broker(store, ledgers, settings, SystemClock())
    await new.start()

    async def take_over() -> None:
        taken = await new.topic(name, create=False)
        while taken.recovery.unavailable:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert len(taken.subscriptions) == count

    await steps.step(f"a topic with {count:,} cursors taken over", count, take_over())
    await new.close()
    await old.close()


async def _work(given: argparse.Namespace, directory: Path, port: int, say: Any) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stops:
        where = argparse.Namespace(url="", directory=directory, port=port)
        store, _, client = await opened(where, stops)
        ledgers = _Ledgers(client)
        steps = _Steps(ledgers, say)
        for name in SHAPES:
            await _shape(name, given.holes, store, ledgers, steps)
        await _subscriptions(given.subscriptions, store, ledgers, steps)
        return steps.lines


def main(arguments: Sequence[str]) -> int:
    """Prints the table."""
    parser = parser_of("python -m bench cursors", __doc__)
    parser.add_argument("--holes", type=int, default=200_000, metavar="N")
    parser.add_argument("--subscriptions", type=int, default=1_000, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    screen = console()
    OUT.mkdir(exist_ok=True)
    screen.print(
        f"{'':44}{'count':>9}{'seconds':>9}{'CPU us':>10}{'KB appended':>13}{'turn ms':>10}{'its CPU':>10}{'MB':>9}"
    )
    with tempfile.TemporaryDirectory(dir=OUT) as text, running_bookie(Path(text)) as bookie:
        lines = uvloop.run(_work(given, Path(text), bookie.ports["bookie"], screen.print))
    path = given.json or OUT / time.strftime("bench-cursors-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(lines, indent=1))
    screen.print(f"all figures: {path}")
    return 0
