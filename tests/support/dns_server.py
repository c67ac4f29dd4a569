"""A DNS server on loopback that answers with the SRV records that a test gives it, in the bytes of RFC 1035 and 2782."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SRV, IN = 33, 1
NAME_ERROR = 3


def encoded_name(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


class DnsServer(asyncio.DatagramProtocol):
    """records: (priority, weight, port, target) by name. asked: the names that were asked for. silent: no answers."""

    def __init__(self) -> None:
        self.records: dict[str, list[tuple[int, int, int, str]]] = {}
        self.asked: list[str] = []
        self.silent = False
        self.port = 0
        self._transport: asyncio.DatagramTransport

    @classmethod
    @asynccontextmanager
    async def start(cls) -> AsyncIterator[DnsServer]:
        transport, self = await asyncio.get_running_loop().create_datagram_endpoint(
            cls, local_addr=("127.0.0.1", 0)
        )
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]
        try:
            yield self
        finally:
            transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        labels, place = [], 12
        while data[place]:
            labels.append(data[place + 1 : place + 1 + data[place]].decode())
            place += 1 + data[place]
        name = ".".join(labels)
        self.asked.append(name)
        question = data[12 : place + 5]
        found = self.records.get(name, [])
        answers = b""
        for priority, weight, port, target in found:
            fields = struct.pack(">HHH", priority, weight, port) + encoded_name(target)
            answers += b"\xc0\x0c" + struct.pack(">HHIH", SRV, IN, 60, len(fields)) + fields
        flags = 0x8180 | (0 if found else NAME_ERROR)
        header = data[:2] + struct.pack(">HHHHH", flags, 1, len(found), 0, 0)
        if not self.silent:
            self._transport.sendto(header + question + answers, addr)
