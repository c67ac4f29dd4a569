"""A bare socket echo, uvloop on both sides: bytes per second with many in flight, and round trips one at a time.

`python -m bench.probes.echo SECONDS COUNT` prints both as JSON.
"""

import asyncio
import json
import subprocess
import sys
import time
from typing import cast

import uvloop

from bench.probes.lifeline import until_hung_up
from bench.probes.ping_pong import RECORD_BYTES, ping_pong

CHUNK = bytes(64 << 10)
WINDOW_BYTES = 1 << 20


class Echo(asyncio.Protocol):
    """Sends back what arrives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(WINDOW_BYTES * 4)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class Stream(asyncio.Protocol):
    """Keeps WINDOW_BYTES in flight until `until`; `finished` holds the bytes that came back."""

    def __init__(self, until: float) -> None:
        self.finished: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._until = until
        self._received = 0
        self._sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(WINDOW_BYTES * 4)
        self._fill()

    def _fill(self) -> None:
        while self._sent - self._received < WINDOW_BYTES:
            self._sent += len(CHUNK)
            self._transport.write(CHUNK)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if time.perf_counter() < self._until:
            self._fill()
        elif not self.finished.done():
            self.finished.set_result(self._received)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.finished.done():
            self.finished.set_exception(error or ConnectionError("the probe's server went away"))


async def serve() -> None:
    """Echoes until standard input ends; prints its port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Echo, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await until_hung_up()
    server.close()


async def measure(port: int, seconds: float, count: int) -> dict[str, float]:
    """Both figures."""
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    _, stream = await loop.create_connection(lambda: Stream(began + seconds), "127.0.0.1", port)
    received = await stream.finished
    rate = received / (time.perf_counter() - began)
    times = await ping_pong(port, RECORD_BYTES, count)
    return {"bytes_per_s": rate, "p50_ms": times.p50, "p99_ms": times.p99}


def main() -> None:
    """Starts the server, measures, and lets the server end."""
    if sys.argv[1:] == ["serve"]:
        uvloop.run(serve())
        return
    server = subprocess.Popen(
        [sys.executable, "-m", "bench.probes.echo", "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        print(json.dumps(uvloop.run(measure(port, float(sys.argv[1]), int(sys.argv[2])))))
    finally:
        server.communicate()


if __name__ == "__main__":
    main()
