"""What many topics cost a broker, and one topic with many ledgers: memory, loading, maintenance, unloading.

    python -m bench topics [--topics N] [--json FILE]

(1) idle topics, each with one durable subscription and one closed ledger: resident memory of each, how fast they load, the
    longest turn of the event loop in a round of maintenance, how fast they unload and what of the memory comes back.
(2) a topic's list of 10, 1,000 and 100,000 ledgers: bytes and time of one more ledger, time of loading the list, the longest
    turn meanwhile.

A broker on ledgers and metadata in memory, in this process: what is measured is the broker, not disks or sockets. What a
publish costs beside many subscriptions or consumers is in `python -m bench dispatch`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.arguments import console
from bench.dispatch import _Clock, _Ledgers
from bench.turns import longest_turn
from magnetar.broker import Broker, BrokerSettings
from magnetar.broker.cursors.entries import encode_acks
from magnetar.broker.log.ledger_list import LedgerList
from magnetar.broker.log.records import CursorRecord, LedgerInfo, TopicRecord, cursor_path, topic_path
from magnetar.metadata.memory import MemoryMetadataStore
from magnetar.proto.ids import TopicName

IDLE_MS = 1
LISTS = (10, 1_000, 100_000)
MORE = 1_000


class _Metadata(MemoryMetadataStore):
    """Counts what is written."""

    written = 0

    async def commit(self, operations: Any) -> None:
        self.written += sum(len(getattr(one, "value", b"")) for one in operations)
        await super().commit(operations)


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _names(count: int) -> list[TopicName]:
    return [TopicName.parse(f"t{number}") for number in range(count)]


def _broker(metadata: Any, **settings: Any) -> Broker:
    ledgers: Any = _Ledgers()
    return Broker(metadata, ledgers, BrokerSettings(**{"maintenance_interval_s": 1e6, **settings}), _Clock())


async def _load(broker: Broker, names: Sequence[TopicName]) -> None:
    for first in range(0, len(names), 64):
        await asyncio.gather(*(broker.topic(name, create=True) for name in names[first : first + 64]))
        await asyncio.sleep(0)


async def _prepare(metadata: Any, names: Sequence[TopicName]) -> None:
    """Topics with a subscription and a closed ledger each, as a broker leaves them."""
    pointer = CursorRecord(-1, [encode_acks((1, 0, 0), [])], 1, {}, [], False).encode()
    for number, name in enumerate(names, 1):
        record = TopicRecord.new(1)
        record.ledgers, record.next_index = [LedgerInfo(number, 0, 1, 1, 100, 1, 1, True)], 1
        await metadata.create(topic_path(name), record.encode())
        await metadata.create(cursor_path(name, "s"), pointer)


async def _idle(count: int) -> dict[str, float]:
    metadata, names = MemoryMetadataStore(), _names(count)
    await _prepare(metadata, names)
    broker = _broker(metadata, topic_idle_unload_ms=IDLE_MS, max_lease_ms=1)
    await broker.start()
    await _load(broker, names[:10])  # what is imported or made once
    before = _resident()
    _, load = await longest_turn(_load(broker, names[10:]))
    loaded = _resident()
    await asyncio.sleep(2 * IDLE_MS / 1000)
    for topic in broker.topics.values():
        topic.used_at = float("inf")  # nothing is unloaded in this round
    _, maintenance = await longest_turn(broker._round())
    for topic in broker.topics.values():
        topic.used_at = 0.0

    async def unload() -> None:
        await broker._unload(await broker._round())

    _, unloading = await longest_turn(unload())
    await asyncio.sleep(0.1)
    after = _resident()
    await broker.close()
    measured = count - 10
    return {
        "topics": count,
        "KB of memory a loaded topic": (loaded - before) / measured / 1024,
        "topics loaded a second": measured / load.seconds,
        "longest turn while loading, ms": load.longest_s * 1000,
        "a round of maintenance, ms": maintenance.seconds * 1000,
        "longest turn in maintenance, ms": maintenance.longest_s * 1000,
        "topics unloaded a second": count / unloading.seconds,
        "longest turn while unloading, ms": unloading.longest_s * 1000,
        "KB left of an unloaded topic": (after - before) / measured / 1024,
    }


async def _list(count: int) -> dict[str, float]:
    metadata = _Metadata()
    ledgers = LedgerList(TopicName.parse("many"), metadata)
    await ledgers.load(create_ms=1)
    now_ms = 1_790_000_000_000

    def info(number: int) -> LedgerInfo:
        return LedgerInfo(number, number * 50_000, 50_000, 50_000, 1 << 31, now_ms, now_ms, True)

    for first in range(0, count, 10_000):
        await ledgers.commit(append=[info(number) for number in range(first, min(first + 10_000, count))])
    metadata.written = 0
    times: list[float] = []
    for number in range(count, count + MORE):
        start = time.perf_counter()
        await ledgers.commit(append=[info(number)])
        times.append(time.perf_counter() - start)
    again = LedgerList(ledgers.name, metadata)
    _, load = await longest_turn(again.load(create_ms=None))
    return {
        "bytes of one more ledger": metadata.written / MORE,
        "us of one more ledger": sum(times) / MORE * 1e6,
        "longest of them, us": max(times) * 1e6,
        "ms to load the list": load.seconds * 1000,
        "longest turn while loading it, ms": load.longest_s * 1000,
    }


async def _lists(say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    found = {f"{count} ledgers": await _list(count) for count in LISTS}
    say(f"{'':38}" + "".join(f"{name:>18}" for name in found))
    for figure in next(iter(found.values())):
        say(f"{figure:38}" + "".join(f"{figures[figure]:18,.1f}" for figures in found.values()))
    return found


def main(arguments: Sequence[str]) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench topics", description=__doc__)
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    screen = console()
    idle = asyncio.run(_idle(given.topics))
    for name, figure in idle.items():
        screen.print(f"{name:38}{figure:18,.1f}")
    lists = asyncio.run(_lists(screen.print))
    if given.json is not None:
        given.json.write_text(json.dumps({"idle topics": idle, "ledger lists": lists}, indent=2))
    return 0
