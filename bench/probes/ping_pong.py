"""The barest client: one record out, one answer back, no future and no task in between."""

import asyncio
import time
from typing import cast

from bench.percentiles import Percentiles, percentiles

RECORD_BYTES = 128


class PingPong(asyncio.Protocol):
    """Sends a record, waits for `answer_bytes`, sends the next; `finished` holds the times in seconds."""

    def __init__(self, answer_bytes: int, count: int) -> None:
        self.finished: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._answer_bytes = answer_bytes
        self._left = count
        self._received = 0
        self._sent_at = 0.0
        self._times: list[float] = []
        self._record = bytes(range(RECORD_BYTES))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._send()

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._record)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._received < self._answer_bytes:
            return
        self._times.append(time.perf_counter() - self._sent_at)
        self._received -= self._answer_bytes
        self._left -= 1
        if self._left:
            self._send()
        else:
            self.finished.set_result(self._times)
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.finished.done():
            self.finished.set_exception(error or ConnectionError("the probe's server went away"))


async def ping_pong(port: int, answer_bytes: int, count: int) -> Percentiles:
    """`count` round trips to the port on this machine; the first tenth is not counted."""
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(lambda: PingPong(answer_bytes, count), "127.0.0.1", port)
    times = await protocol.finished
    return percentiles(times[count // 10 :])
