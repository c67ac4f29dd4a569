"""The simulated network: bytes in order, bounded windows, cuts, partitions, dead peers."""

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from support.sim import SimLoop, SimProcess
from support.sim.transport import WINDOWS


class Recorder(asyncio.Protocol):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.pieces = 0
        self.events: list[str] = []
        self.errors: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.pieces += 1

    def eof_received(self) -> None:
        self.events.append("eof")

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, error: Exception | None) -> None:
        self.events.append("lost")
        self.errors.append(error)


@pytest.fixture
def loop() -> Any:
    made = SimLoop(seed=5)
    yield made
    made.close()


async def pair(loop: SimLoop, server: SimProcess | None = None) -> tuple[Recorder, Recorder]:
    accepted: list[Recorder] = []

    def factory() -> Recorder:
        accepted.append(Recorder())
        return accepted[-1]

    process = server or loop.start_process("server")
    listening = await process.spawn(loop.create_server(factory, "127.0.0.1", 0))
    _, client = await loop.create_connection(Recorder, "localhost", listening.sockets[0].getsockname()[1])
    await asyncio.sleep(0.1)
    return cast(Recorder, client), accepted[0]


@pytest.mark.parametrize("seed", range(20))
def test_bytes_arrive_complete_in_order_and_in_pieces(seed: int) -> None:
    loop = SimLoop(seed)
    sent = random.Random(seed).randbytes(3_000_000)

    async def main() -> None:
        client, server = await pair(loop)
        position = 0
        while position < len(sent):
            size = loop.rng.choice((1, 10, 1000, 100_000))
            client.transport.writelines(
                [sent[position : position + size // 2], sent[position + size // 2 : position + size]]
            )
            position += size
        client.transport.close()
        await asyncio.sleep(10)
        assert server.data == sent
        assert server.events == ["made", "eof", "lost"]
        assert client.events[-1] == "lost"
        assert client.errors == [None]
        assert server.pieces > 3

    loop.run(main())
    loop.close()


def test_peer_that_stops_reading_fills_the_write_buffer_and_pauses_the_writer(loop: SimLoop) -> None:
    async def main() -> None:
        client, server = await pair(loop)
        server.transport.pause_reading()
        for _ in range(100):
            client.transport.write(bytes(50_000))
            await asyncio.sleep(0.01)
        assert client.events == ["made", "pause"]
        assert client.transport.get_write_buffer_size() > 3_000_000
        assert not server.data
        server.transport.resume_reading()
        await asyncio.sleep(5)
        assert client.events == ["made", "pause", "resume"]
        assert client.transport.get_write_buffer_size() == 0
        assert len(server.data) == 5_000_000

    loop.run(main())


def test_abort_loses_the_buffer_and_what_the_kernel_has_arrives_with_the_end(loop: SimLoop) -> None:
    """As measured with asyncio and uvloop: an abort closes the socket, which resets only what was not read."""

    async def main() -> None:
        client, server = await pair(loop)
        client.transport.write(bytes(5_000_000))
        client.transport.abort()
        await asyncio.sleep(5)
        assert 0 < len(server.data) < 5_000_000
        assert server.events == ["made", "eof", "lost"]
        assert client.errors == server.errors == [None]
        client.transport.write(b"into the void")

    loop.run(main())


def test_abort_with_unread_bytes_resets_the_peer(loop: SimLoop) -> None:
    async def main() -> None:
        client, server = await pair(loop)
        client.transport.pause_reading()
        server.transport.write(b"never read")
        await asyncio.sleep(1)
        client.transport.abort()
        await asyncio.sleep(1)
        assert isinstance(server.errors[0], ConnectionResetError)

    loop.run(main())


async def reset_while_paused(loop: SimLoop) -> Recorder:
    """An end that does not read, with bytes that arrived before its peer was killed."""
    process = loop.start_process("server")
    client, server = await pair(loop, process)
    client.transport.pause_reading()
    server.transport.pause_reading()
    server.transport.write(b"arrived")
    client.transport.write(b"never read")  # so that a close of the server's socket resets
    await asyncio.sleep(1)
    process.kill()
    await asyncio.sleep(1)
    return client


def test_reset_is_told_to_a_reader_when_it_reads_and_behind_what_had_arrived(loop: SimLoop) -> None:
    async def main() -> None:
        client = await reset_while_paused(loop)
        assert client.events == ["made"]
        client.transport.resume_reading()
        await asyncio.sleep(1)
        assert client.data == b"arrived"
        assert client.events == ["made", "lost"]
        assert isinstance(client.errors[0], ConnectionResetError)

    loop.run(main())


def test_reset_is_told_to_a_writer_at_once(loop: SimLoop) -> None:
    async def main() -> None:
        client = await reset_while_paused(loop)
        client.transport.write(b"more")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert client.events == ["made", "lost"]
        assert not client.data

    loop.run(main())


def test_half_close_of_a_connection_that_was_reset_is_refused(loop: SimLoop) -> None:
    async def main() -> None:
        client = await reset_while_paused(loop)
        with pytest.raises(OSError, match="not connected"):
            client.transport.write_eof()

    loop.run(main())


def test_closing_transport_sends_what_is_written_behind_its_buffer_and_reads_nothing(loop: SimLoop) -> None:
    async def main() -> None:
        client, server = await pair(loop)
        server.transport.pause_reading()
        client.transport.write(bytes(5_000_000))
        client.transport.close()
        client.transport.write(b"last")
        server.transport.write_eof()
        await asyncio.sleep(1)
        assert client.events == ["made", "pause"]
        server.transport.resume_reading()
        await asyncio.sleep(5)
        assert len(server.data) == 5_000_004
        assert "eof" not in client.events

    loop.run(main())


def test_connect_that_is_cancelled_leaves_no_connection(loop: SimLoop) -> None:
    async def main() -> None:
        _, server = await pair(loop)
        port = server.transport.get_extra_info("sockname")[1]
        before = len(loop.network.live_links())
        attempt = loop.create_task(loop.create_connection(Recorder, "127.0.0.1", port))
        while len(loop.network.live_links()) == before:
            await asyncio.sleep(0)
        attempt.cancel()
        await asyncio.sleep(1)
        assert attempt.cancelled()
        assert len(loop.network.live_links()) == before

    loop.run(main())


def test_backlog_of_a_listener_that_is_closed_is_reset() -> None:
    outcomes = set()

    async def main(loop: SimLoop) -> None:
        process = loop.start_process("server")
        server = await process.spawn(loop.create_server(Recorder, "127.0.0.1", 7650))
        process.pause(1.0)  # it accepts nothing meanwhile, and its kernel does
        _, client = await loop.create_connection(Recorder, "127.0.0.1", 7650)
        server.close()
        await asyncio.sleep(2)
        outcomes.add(cast(Recorder, client).events[-1])

    for seed in range(20):
        loop = SimLoop(seed)
        loop.run(main(loop))
        loop.close()
    assert outcomes == {"made", "lost"}


def test_power_loss_is_told_to_nobody_and_what_is_sent_to_the_machine_meets_a_reset_later(
    loop: SimLoop,
) -> None:
    async def main() -> None:
        process = loop.start_process("server")
        reading, _ = await pair(loop, process)
        writing, server = await pair(loop, process)
        port = server.transport.get_extra_info("sockname")[1]
        process.kill(power=True)
        writing.transport.write(b"are you there?")
        connecting = loop.create_task(loop.create_connection(Recorder, "127.0.0.1", port))
        await asyncio.sleep(30)
        assert reading.events == writing.events == ["made"]
        assert not connecting.done()
        loop.start_process("server")
        await asyncio.sleep(1)
        assert isinstance(writing.errors[0], ConnectionResetError)
        assert reading.events == ["made"]
        assert isinstance(connecting.exception(), ConnectionRefusedError)
        reading.transport.write(b"and you?")
        await asyncio.sleep(1)
        assert isinstance(reading.errors[0], ConnectionResetError)

    loop.run(main())


def test_nobody_listens_is_refused_and_a_port_is_taken_once(loop: SimLoop) -> None:
    async def main() -> None:
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(Recorder, "127.0.0.1", 1)
        server = await loop.create_server(Recorder, "127.0.0.1", 7650)
        with pytest.raises(OSError, match="in use"):
            await loop.create_server(Recorder, "localhost", 7650)
        server.close()
        await server.wait_closed()
        await loop.create_server(Recorder, "127.0.0.1", 7650)

    loop.run(main())


@pytest.mark.parametrize("seed", range(10))
def test_killed_process_is_noticed_by_its_peer_and_never_told_itself(seed: int) -> None:
    loop = SimLoop(seed)

    async def main() -> None:
        process = loop.start_process("server")
        client, server = await pair(loop, process)
        server.transport.write(b"before the end")
        process.kill()
        await asyncio.sleep(1)
        assert client.events[-1] == "lost"
        assert server.events == ["made"]
        assert bytes(client.data) in (b"", b"before the end")
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(
                Recorder, "127.0.0.1", server.transport.get_extra_info("sockname")[1]
            )

    loop.run(main())
    loop.close()


@pytest.mark.parametrize("seed", range(10))
def test_what_a_process_sent_and_closed_before_its_end_arrives(seed: int) -> None:
    loop = SimLoop(seed)

    async def main() -> None:
        process = loop.start_process("server")
        client, server = await pair(loop, process)
        for _ in range(10):
            server.transport.write(b"last words")
        server.transport.close()
        await asyncio.sleep(0)  # the transport tells it, and nothing has arrived yet
        process.kill()
        await asyncio.sleep(1)
        assert client.data == b"last words" * 10
        assert client.events == ["made", "eof", "lost"]
        assert client.errors == [None]

    loop.run(main())
    loop.close()


def test_cut_reaches_both_ends_and_loses_what_was_on_its_way(loop: SimLoop) -> None:
    async def main() -> None:
        client, server = await pair(loop)
        client.transport.write(bytes(1000))
        assert loop.network.cut_one()
        await asyncio.sleep(1)
        for end in (client, server):
            assert isinstance(end.errors[0], ConnectionResetError)
        assert not server.data
        assert not loop.network.cut_one()
        assert loop.trace.faults["cut"] == 1

    loop.run(main())


def partition(loop: SimLoop) -> bool:
    loop.network.partition(0.001)
    return False


FAULTS: dict[str, Callable[[SimLoop, Recorder, SimProcess], object]] = {
    "cut": lambda loop, client, process: loop.network.cut_one(),
    "abort": lambda loop, client, process: client.transport.abort(),
    "close": lambda loop, client, process: client.transport.close(),
    "kill": lambda loop, client, process: process.kill(),
    "power": lambda loop, client, process: process.kill(power=True),
    "partition": lambda loop, client, process: partition(loop),
    "cut in a partition": lambda loop, client, process: partition(loop) or loop.network.cut_one(),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", range(20))
def test_what_arrives_is_always_a_prefix_of_what_was_written(seed: int, fault: str) -> None:
    """Both ends go on writing until they are told of the fault, and one of them is told later than the other."""
    loop = SimLoop(seed)
    data = random.Random(seed).randbytes(200_000)

    async def write(end: Recorder) -> None:
        position = 0
        while position < len(data):
            size = loop.rng.choice((1, 100, 5000))
            end.transport.write(data[position : position + size])
            position += size
            await asyncio.sleep(loop.rng.uniform(0, 100e-6))

    async def main() -> None:
        process = loop.start_process("server")
        client, server = await pair(loop, process)
        writers = [loop.create_task(write(client)), process.spawn(write(server))]
        await asyncio.sleep(loop.rng.uniform(0, 3e-3))
        FAULTS[fault](loop, client, process)
        await asyncio.sleep(5)
        for end in (client, server):
            assert data.startswith(end.data), len(end.data)
        assert writers[0].done()

    loop.run(main())
    loop.close()


def test_partition_holds_everything_back_until_it_heals(loop: SimLoop) -> None:
    async def main() -> None:
        client, server = await pair(loop)
        loop.network.partition(30)
        client.transport.write(b"late")
        port = server.transport.get_extra_info("sockname")[1]
        late = asyncio.create_task(loop.create_connection(Recorder, "127.0.0.1", port))
        await asyncio.sleep(29)
        assert not server.data
        assert not late.done()
        await asyncio.sleep(2)
        assert server.data == b"late"
        assert late.done()
        assert loop.trace.faults["partition"] == 1

    loop.run(main())


def test_one_way_partition_holds_acknowledgements_back_so_that_the_other_way_ends_at_the_window(
    loop: SimLoop,
) -> None:
    async def main() -> None:
        client, server = await pair(loop)
        loop.network.block("", "server", 30)
        server.transport.write(bytes(5_000_000))
        await asyncio.sleep(29)
        assert 0 < len(client.data) <= max(WINDOWS)
        await asyncio.sleep(5)
        assert len(client.data) == 5_000_000
        assert server.events == ["made", "pause", "resume"]

    loop.run(main())


def test_process_that_dies_behind_a_partition_is_noticed_after_it(loop: SimLoop) -> None:
    async def main() -> None:
        process = loop.start_process("server")
        client, _ = await pair(loop, process)
        loop.network.partition(30)
        process.kill()
        await asyncio.sleep(25)
        assert client.events == ["made"]
        await asyncio.sleep(10)
        assert client.events[-1] == "lost"

    loop.run(main())
