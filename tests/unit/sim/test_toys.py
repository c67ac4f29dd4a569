"""Two toys on the kit: requests over the real framed connection while links break, and a journal that loses power."""

import asyncio
import random
import struct
from typing import Any

import pytest
from xxhash import xxh3_64_digest

from magnetar.proto.commands import TopicStats, decode_command
from magnetar.proto.errors import MagnetarError, RetryableError
from magnetar.proto.frames import Run
from magnetar.runtime.connection import Connection, ConnectionOptions, open_connection, start_server
from magnetar.runtime.files import Files
from support.sim import ProcessKilled, SimDisk, SimLoop

PORT = 7650


class Echo:
    """Answers a TopicStats request with its own topic and payload."""

    connection: Connection

    def connection_ready(self, connection: Connection) -> None:
        self.connection = connection

    def runs_received(self, runs: list[Run]) -> None:
        for header, payloads in runs:
            command = decode_command(header)
            assert isinstance(command, TopicStats)
            for payload in payloads:
                self.connection.answer(command.request_id, command.topic, payload)

    def connection_closed(self, error: MagnetarError | None) -> None:
        pass

    def writing_resumed(self) -> None:
        pass


async def serve() -> None:
    await start_server("127.0.0.1", PORT, Echo, ConnectionOptions("echo"))


def run_echo(seed: int) -> tuple[str, dict[str, int], int]:
    loop = SimLoop(seed)
    answered = 0

    async def chaos() -> None:
        for _ in range(10):
            await asyncio.sleep(loop.rng.expovariate(2))
            match loop.rng.randrange(4):
                case 0:
                    loop.processes["server"].kill()
                    await asyncio.sleep(loop.rng.uniform(0, 1))
                    loop.start_process("server").spawn(serve())
                case 1:
                    loop.network.partition(loop.rng.uniform(0, 2))
                case 2:
                    loop.network.cut_one()
                case _:
                    loop.processes["server"].pause(loop.rng.uniform(0, 2))

    async def client() -> None:
        nonlocal answered
        connection: Connection | None = None
        for number in range(300):
            while True:
                try:
                    if connection is None or connection.closed:
                        options = ConnectionOptions("client", ping_interval_s=1)
                        connection = await open_connection("127.0.0.1", PORT, Echo(), options)
                    payload = loop.rng.randbytes(loop.rng.choice((0, 10, 10_000, 300_000)))
                    reply = await connection.request(TopicStats(0, str(number)), payload, timeout=2)
                    assert (reply.result, reply.payload) == (str(number), payload)
                    answered += 1
                    break
                except RetryableError:
                    await asyncio.sleep(0.1)

    async def main() -> None:
        loop.start_process("server").spawn(serve())
        storm = asyncio.create_task(chaos())
        await loop.start_process("client").spawn(client())
        await storm

    loop.run(main())
    loop.close()
    return loop.trace.hexdigest(), dict(loop.trace.faults), answered


@pytest.mark.parametrize("seed", range(12))
def test_echo_over_the_real_connection_survives_and_replays(seed: int) -> None:
    first = run_echo(seed)
    assert first[2] == 300
    assert first[1]
    assert run_echo(seed) == first


class ToyJournal:
    """Length, checksum, record; one sync per append. `sync` False plants the defect that the test must find."""

    def __init__(self, files: Files, *, sync: bool = True) -> None:
        self._sync = sync
        if not files.exists("/data"):
            files.make_directory("/data")
        fresh = not files.exists("/data/journal")
        self._file = files.open("/data/journal", create=True)
        if fresh:
            files.sync_directory("/data")
        self.records: list[bytes] = []
        self._end = 0
        while len(head := self._file.read_at(self._end, 12)) == 12:
            record = self._file.read_at(self._end + 12, struct.unpack_from(">I", head)[0])
            if not record or xxh3_64_digest(record) != head[4:]:
                break
            self.records.append(record)
            self._end += 12 + len(record)

    def append(self, record: bytes) -> None:
        self._file.write_at(self._end, [struct.pack(">I", len(record)), xxh3_64_digest(record), record])
        if self._sync:
            self._file.sync()
        self._end += 12 + len(record)


def run_journal(seed: int, crash_at: int, *, sync: bool) -> bool:
    """Crashes at one disk call; True when every record that was confirmed is there after the restart."""
    loop: Any = SimLoop(seed)
    disk = SimDisk(random.Random(seed), trace=loop.trace)
    process = loop.start_process("daemon")
    files = disk.mount(process)
    confirmed: list[bytes] = []
    disk.at_call(crash_at, process.kill)

    def work() -> None:
        journal = ToyJournal(files, sync=sync)
        for number in range(10):
            record = b"%d" % number * 1000
            journal.append(record)
            confirmed.append(record)

    try:
        process.call(work)
    except ProcessKilled:
        assert loop.trace.faults["crash_at_call"] == 1
    process.kill()
    disk.lose_power()
    survivors = ToyJournal(disk.mount()).records
    loop.close()
    return survivors[: len(confirmed)] == confirmed


def test_toy_journal_survives_a_crash_at_every_disk_call() -> None:
    for call in range(26):
        for seed in range(5):
            assert run_journal(seed, call, sync=True), (seed, call)


def test_toy_journal_without_sync_is_caught() -> None:
    caught = [
        (seed, call) for call in range(26) for seed in range(5) if not run_journal(seed, call, sync=False)
    ]
    assert len(caught) > 30
