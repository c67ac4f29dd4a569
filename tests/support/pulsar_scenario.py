"""Plays the text scenarios of Pulsar's protocol (tests/scenarios/pulsar_*.txt): frames in, frames out, in virtual time.

    A PRODUCER topic:"t" producer_id:1 request_id:2    client A sends a command, its fields in protobuf's text format
    A SEND producer_id:1 sequence_id:0 | value         with a message; of several values a batch is made
    A SEND producer_id:1 sequence_id:0 | uuid:"x" chunk_id:0 | value        with more in its metadata
    A DAMAGED producer_id:1 ...                        the same, but the last byte is another one than was checksummed
    A COMMAND ... && COMMAND ...                       in one write
    A bytes 00ff                                       what is no frame
    A close | A deaf | A hears                         it disconnects; it does not read, or answer pings; it does again
    unload TOPIC | terminate TOPIC | seconds N         the service, or the time

A client connects when it is named first; `A CONNECT` without fields has the usual ones. An answer is all that the clients
received within half a second, in the order in which they did.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from google.protobuf import text_format

from magnetar.broker import Broker, start_pulsar_listener
from magnetar.proto.errors import TopicNotServed
from magnetar.proto.ids import TopicName
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.commands import FIELDS
from magnetar.proto.pulsar.frames import PONG, encode_frame
from magnetar.runtime.connection import ConnectionOptions, FramedServer
from support.broker_kit import running_broker
from support.pulsar_messages import batch, frame, read_frame, single
from support.text_scenarios import play_async

CONNECT = 'client_version:"test" protocol_version:21'
PAUSE_S = 0.5
_BATCH = " "


class PulsarClient:
    """Bytes in, commands out; it answers pings unless it is deaf."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.received: list[tuple[str, Any, bytes]] = []
        self.ended = False
        self.deaf = asyncio.Event()
        self._together: list[bytes] | None = None
        self._hears = asyncio.Event()
        self._hears.set()
        self._task = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def connect(cls, server: FramedServer) -> PulsarClient:
        """To the listener."""
        return cls(*await asyncio.open_connection(*server.addresses[0]))

    @classmethod
    async def opened(cls, host: str, port: int) -> PulsarClient:
        """It has shaken hands."""
        client = cls(*await asyncio.open_connection(host, port))
        client.send("CONNECT", client_version="test", protocol_version=21)
        await client.next("connected")
        return client

    def hear(self, *, hears: bool) -> None:
        """Whether it reads."""
        if hears:
            self._hears.set()
        else:
            self._hears.clear()

    async def _read(self) -> None:
        data = b""
        while True:
            while len(data) >= 4 and len(data) >= (end := 4 + int.from_bytes(data[:4], "big")):
                size = int.from_bytes(data[4:8], "big")
                command = wire.BaseCommand.FromString(data[8 : 8 + size])
                self._take(command, data[8 + size : end])
                data = data[end:]
            await self._hears.wait()
            try:
                more = await self.reader.read(1 << 16)
            except ConnectionError:
                more = b""
            if not more:
                self.ended = True
                return
            await self._hears.wait()
            data += more

    def _take(self, command: wire.BaseCommand, rest: bytes) -> None:
        name = FIELDS[command.type]
        if name == "ping":
            self.writer.write(PONG)
        else:
            self.received.append((name, getattr(command, name), rest))

    async def until(self, count: int) -> None:
        """It has received so many commands."""
        async with asyncio.timeout(60):
            while len(self.received) < count:
                await asyncio.sleep(0.01)

    async def next(self, name: str) -> Any:
        """The next command, which is of that name."""
        async with asyncio.timeout(60):
            while not self.received:
                assert not self.ended, "the connection is closed"
                await asyncio.sleep(0.01)
        found, command, _ = self.received.pop(0)
        assert found == name, (found, command)
        return command

    async def read(self, topic: str, last: bytes) -> list[bytes]:
        """What a new subscription gets, up to the value `last`; of unbatched messages these are the values."""
        self.send(
            "SUBSCRIBE",
            topic=topic,
            subscription="r",
            sub_type=0,
            consumer_id=1,
            request_id=1,
            initial_position=1,
        )
        await self.next("success")
        self.send("FLOW", consumer_id=1, message_permits=2**32 - 1)
        found: list[bytes] = []
        async with asyncio.timeout(60):
            while last not in found:
                await asyncio.sleep(0.05)
                bodies = [rest for name, _, rest in self.received if name == "message"]
                self.received.clear()
                found += [rest[10 + int.from_bytes(rest[6:10]) :] for rest in bodies]
        return found

    def send(self, name: str, rest: bytes = b"", **fields: Any) -> None:
        """A command by its name."""
        kind = wire.BaseCommand.Type.Value(name)
        command = wire.BaseCommand(type=kind)  # type: ignore[arg-type]
        part = getattr(command, FIELDS[kind])
        part.SetInParent()
        part.MergeFrom(type(part)(**fields))
        data = encode_frame(command.SerializeToString(), rest)
        if self._together is None:
            self.writer.write(data)
        else:
            self._together.append(data)

    @contextmanager
    def one_write(self) -> Iterator[None]:
        """What is sent meanwhile arrives together."""
        self._together = together = list[bytes]()
        yield
        self._together = None
        self.writer.write(b"".join(together))

    async def close(self) -> None:
        """Disconnects."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.writer.transport.abort()


@asynccontextmanager
async def pulsar_server(
    options: ConnectionOptions | None = None, *, port: int = 6650, **settings: Any
) -> AsyncIterator[tuple[Broker, FramedServer]]:
    """A broker on fakes whose listener has a port."""
    async with running_broker(pulsar_port=port, **settings) as broker:
        options = options or ConnectionOptions("broker", handshake_timeout_s=30.0)
        server = await start_pulsar_listener(broker, "127.0.0.1", port, options)
        try:
            yield broker, server
        finally:
            await server.close(0.0)


class PulsarScenario:
    """A broker and the clients of one scenario."""

    def __init__(self, broker: Broker, server: FramedServer) -> None:
        self._broker = broker
        self._server = server
        self._clients: dict[str, PulsarClient] = {}
        self._ended: set[str] = set()

    async def run(self, command: str) -> list[str]:
        """What a command leads to."""
        who, _, rest = command.partition(" ")
        if who.isupper():
            await self._of_client(who, rest)
        elif who == "unload":
            await self._broker.unload(TopicName.parse(rest), TopicNotServed("the topic is unloaded"))
        elif who == "terminate":
            await (await self._broker.topic(TopicName.parse(rest), create=False)).terminate()
        elif who == "seconds":
            await asyncio.sleep(float(rest))
        else:
            raise AssertionError(f"unknown: {command}")
        await asyncio.sleep(PAUSE_S)
        return [line for name, client in self._clients.items() for line in self._received(name, client)]

    async def _of_client(self, who: str, rest: str) -> None:
        if who not in self._clients:
            self._clients[who] = await PulsarClient.connect(self._server)
        client = self._clients[who]
        if rest == "close":
            await self._clients.pop(who).close()
        elif rest in ("deaf", "hears"):
            client.hear(hears=rest == "hears")
        elif rest.startswith("bytes "):
            client.writer.write(bytes.fromhex(rest.removeprefix("bytes ")))
        else:
            client.writer.write(b"".join(_encoded(one) for one in rest.split(" && ")))

    def _received(self, name: str, client: PulsarClient) -> list[str]:
        lines = [f"{name} {shown(*one)}" for one in client.received]
        client.received.clear()
        if client.ended and name not in self._ended:
            self._ended.add(name)
            lines.append(f"{name} is disconnected")
        return lines

    async def close(self) -> None:
        """All clients."""
        for client in self._clients.values():
            await client.close()


def _encoded(text: str) -> bytes:
    name, _, rest = text.partition(" ")
    if name in ("SEND", "DAMAGED"):
        return _send(rest, damaged=name == "DAMAGED")
    fields = rest or (CONNECT if name == "CONNECT" else "")
    command = text_format.Parse(f"type: {name} {name.lower()} {{ {fields} }}", wire.BaseCommand())
    return encode_frame(command.SerializeToString())


def _send(text: str, *, damaged: bool) -> bytes:
    fields, *between, values = [part.strip() for part in text.split("|")]
    command = text_format.Parse(f"type: SEND send {{ {fields} }}", wire.BaseCommand())
    metadata = text_format.Parse(
        f'producer_name:"p" sequence_id:{command.send.sequence_id} publish_time:1000 {" ".join(between)}',
        wire.MessageMetadata(),
    )
    parts = [value.encode() for value in values.split(_BATCH)]
    given = {field.name: value for field, value in metadata.ListFields()}
    content = frame(parts[0], **given) if len(parts) == 1 else batch([single(one) for one in parts], **given)
    if damaged:
        content = content[:-1] + bytes([content[-1] ^ 1])
    return encode_frame(command.SerializeToString(), content)


def shown(name: str, command: Any, rest: bytes) -> str:
    """A command as scenarios have it."""
    line = f"{name.upper()} {text_format.MessageToString(command, as_one_line=True)}".strip()
    if not rest:
        return line
    _, messages = read_frame(rest)
    return f"{line} | {_BATCH.join(value.decode() for _, value in messages)}"


async def run_pulsar_scenario(text: str) -> str:
    """The text with what the service did."""
    async with pulsar_server() as (broker, server):
        scenario = PulsarScenario(broker, server)
        try:
            return await play_async(text, scenario.run)
        finally:
            await scenario.close()
