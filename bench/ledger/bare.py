"""What a sparse append costs a client before it is one: the same bytes at the same pace over bare sockets.

`python -m bench.ledger.bare RATE COUNT SIZE COPIES` prints the CPU seconds of the sending process as JSON. COPIES servers,
all in one other process, answer each record of SIZE bytes with as many as an AddDone row has. Each record wakes this
process once to send and up to COPIES times to hear, as an append does: most of what that costs is the kernel, and caches
that others have used meanwhile.
"""

import asyncio
import json
import subprocess
import sys
import time
from typing import cast

import uvloop

from bench.probes.lifeline import until_hung_up

ANSWER = bytes(30)


class Sink(asyncio.Protocol):
    """Answers each record."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        while self._received >= self._size:
            self._received -= self._size
            self._transport.write(ANSWER)


class Copy(asyncio.Protocol):
    """One connection of the sender; `heard` is called for each answer."""

    def __init__(self, sender: "Sender") -> None:
        self._sender = sender
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        while self._received >= len(ANSWER):
            self._received -= len(ANSWER)
            self._sender.left -= 1
            if not self._sender.left:
                self._sender.done.set()


class Sender:
    """Sends each record when it is due."""

    def __init__(self) -> None:
        self.left = 0
        self.done = asyncio.Event()

    async def run(self, ports: list[int], rate: float, count: int, size: int) -> float:
        """CPU seconds."""
        loop = asyncio.get_running_loop()
        copies = [(await loop.create_connection(lambda: Copy(self), "127.0.0.1", port))[1] for port in ports]
        record = bytes(size)
        self.left = count * len(copies)
        cpu, began = time.process_time(), time.perf_counter()
        for number in range(count):
            await asyncio.sleep(began + number / rate - time.perf_counter())
            for copy in copies:
                copy.transport.write(record)
        await self.done.wait()
        spent = time.process_time() - cpu
        for copy in copies:
            copy.transport.close()
        return spent


async def serve(size: int, copies: int) -> None:
    """Until standard input ends; prints the ports."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: Sink(size), "127.0.0.1", 0) for _ in range(copies)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await until_hung_up()
    for server in servers:
        server.close()


def main(rate: float, count: int, size: int, copies: int) -> None:
    """Starts the servers, sends, prints."""
    command = [sys.executable, "-m", "bench.ledger.bare", "serve", str(size), str(copies)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as servers:
        assert servers.stdout is not None
        assert servers.stdin is not None
        ports = [int(port) for port in servers.stdout.readline().split()]
        spent = uvloop.run(Sender().run(ports, rate, count, size))
        servers.stdin.close()
    print(json.dumps({"cpu_s": spent, "records": count}))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        uvloop.run(serve(int(sys.argv[2]), int(sys.argv[3])))
    else:
        main(float(sys.argv[1]), *(int(text) for text in sys.argv[2:5]))
