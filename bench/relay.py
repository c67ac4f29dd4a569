"""What is on the wire: a relay between client and service that takes the frames apart and counts.

A look-up answers with the service's own address; the relay puts its own there, so that the client stays with it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from magnetar.proto.batch import decode_batch_header
from magnetar.proto.commands import Ok, Send, decode_command
from magnetar.proto.frames import FrameParser, encode_frame


class WireCount:
    """SEND frames and what was in them."""

    def __init__(self) -> None:
        self.frames = 0
        self.batches = 0
        self.messages = 0

    @property
    def one_by_one(self) -> bool:
        """Every message was a batch of its own in a frame of its own."""
        return self.frames == self.batches == self.messages > 0

    def count(self, payload: bytes) -> None:
        """One SEND."""
        self.frames += 1
        offset = 0
        while offset < len(payload):
            header = decode_batch_header(payload, offset)
            offset += header.size
            self.batches += 1
            self.messages += header.message_count


async def count_sends(
    host: str, port: int, workload: str, topic: str, parameters: dict[str, Any]
) -> WireCount:
    """Runs the workload's client through a relay."""
    count = WireCount()
    pumps: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        service_reader, service_writer = await asyncio.open_connection(host, port)
        pumps.append(asyncio.create_task(_pump(reader, service_writer, count, "")))
        pumps.append(asyncio.create_task(_pump(service_reader, writer, None, url)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"magnetar://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.client", workload, url, topic, json.dumps(parameters)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    code = await client.wait()
    server.close()
    for pump in pumps:
        pump.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)
    assert code == 0, f"the client of the wire check ended with {code}"
    return count


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: WireCount | None, url: str
) -> None:
    parser = FrameParser()
    while data := await reader.read(1 << 16):
        for header, payloads in parser.feed(data):
            command = decode_command(header)
            if count is not None and isinstance(command, Send):
                for payload in payloads:
                    count.count(payload)
            if isinstance(command, Ok) and isinstance(command.result, dict) and "url" in command.result:
                header = Ok(command.request_id, {**command.result, "url": url}).encode()
            for payload in payloads:
                writer.write(encode_frame(header, payload))
        await writer.drain()
    writer.close()
