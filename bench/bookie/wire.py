"""A raw client of the bookie protocol: one blocking socket, frames prepared before the clock runs, adds pipelined.

It does what a client cannot do without and nothing else, so that the figures are the bookie's: the bytes of an entry are
made beforehand, adds leave by the hundred in one system call, and of an answer only its rows are counted.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from magnetar.proto.commands import ADD_DONE_ROW, AddDone, AddEntry, Failed, Ok, decode_command, peek_number
from magnetar.proto.frames import FrameParser, frame_prefix
from magnetar.proto.ledger_entry import LEDGER_ENTRY_FIELDS, LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.connection.handshake import ConnectingHandshake, shake_hands
from magnetar.runtime.connection.options import ConnectionOptions

ADD_HEADER = AddEntry(0, False).encode()
RECEIVE_BYTES = 1 << 20
# Frames below this are joined into pieces of about CHUNK_BYTES; larger ones are sent as head and shared payload.
LARGE_BYTES = 32 << 10
CHUNK_BYTES = 128 << 10
MAX_VECTOR = 256
PREFIX_BYTES = len(frame_prefix(ADD_HEADER, 0))
FRAME_OVERHEAD = PREFIX_BYTES + LEDGER_ENTRY_HEADER_BYTES


class Chunk(NamedTuple):
    """What is sent together: pieces, how many adds they hold, their bytes on the wire."""

    pieces: tuple[bytes, ...]
    adds: int
    size: int


def entry_head(ledger_id: int, entry_id: int, payload: bytes) -> bytes:
    """Frame prefix, header and ledger entry header of an add, before its payload."""
    fields = LEDGER_ENTRY_FIELDS.pack(ledger_id, entry_id, entry_id - 1, (entry_id + 1) * len(payload))
    digest = xxhash.xxh3_64(fields)
    digest.update(payload)
    return frame_prefix(ADD_HEADER, LEDGER_ENTRY_HEADER_BYTES + len(payload)) + fields + digest.digest()


def make_adds(count: int, size: int, *, ledgers: int, first_ledger: int, first_entry: int = 0) -> list[Chunk]:
    """`count` adds of `size` payload bytes, dealt to `ledgers` ledgers in turn."""
    payload = os.urandom(size)
    heads = (
        entry_head(first_ledger + number % ledgers, first_entry + number // ledgers, payload)
        for number in range(count)
    )
    if size >= LARGE_BYTES:
        return [Chunk((head, payload), 1, len(head) + size) for head in heads]
    chunks: list[Chunk] = []
    parts: list[bytes] = []
    per_chunk = max(1, CHUNK_BYTES // (FRAME_OVERHEAD + size))
    for head in heads:
        parts += (head, payload)
        if len(parts) == 2 * per_chunk:
            chunks.append(_joined(parts))
            parts = []
    if parts:
        chunks.append(_joined(parts))
    return chunks


def _joined(parts: list[bytes]) -> Chunk:
    data = b"".join(parts)
    return Chunk((data,), len(parts) // 2, len(data))


class RawClient:
    """One connection to a bookie."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        options = ConnectionOptions(name="bench")
        handshake = ConnectingHandshake(options)
        self._parser = FrameParser(options.max_frame_bytes)
        self._buffer = bytearray(RECEIVE_BYTES)
        self._socket.sendall(handshake.begin())
        negotiated = None
        while negotiated is None:
            answer, negotiated, _ = shake_hands(handshake, self._parser.feed(self._socket.recv(65536)))
            if answer:
                self._socket.sendall(answer)

    def close(self) -> None:
        """At once."""
        self._socket.close()

    # --- adds ---------------------------------------------------------------------------------------------------------

    def add_all(self, chunks: Sequence[Chunk], *, window_bytes: int, window_adds: int) -> float:
        """Sends everything with at most so much outstanding; returns the seconds until the last add is durable."""
        sock = self._socket
        sock.setblocking(False)
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        mean = sum(chunk.size for chunk in chunks) / max(1, sum(chunk.adds for chunk in chunks))
        limit = max(1, min(window_adds, int(window_bytes / mean)))
        outstanding, position, writable = 0, 0, True
        unsent: list[memoryview] = []
        began = time.perf_counter()
        while position < len(chunks) or unsent or outstanding:
            while writable and (unsent or (position < len(chunks) and outstanding < limit)):
                while position < len(chunks) and outstanding < limit and len(unsent) < MAX_VECTOR:
                    chunk = chunks[position]
                    unsent += map(memoryview, chunk.pieces)
                    outstanding += chunk.adds
                    position += 1
                writable = self._send(unsent)
            poller.modify(sock, select.POLLIN if writable else select.POLLIN | select.POLLOUT)
            for _, event in poller.poll(30_000) or _timed_out():
                if event & select.POLLOUT:
                    writable = True
                if event & ~select.POLLOUT:
                    outstanding -= self._receive_done()
        seconds = time.perf_counter() - began
        sock.setblocking(True)
        return seconds

    def _send(self, unsent: list[memoryview]) -> bool:
        """False when the socket takes no more."""
        try:
            sent = self._socket.sendmsg(unsent)
        except BlockingIOError:
            return False
        full = sent == sum(map(len, unsent))
        while unsent and sent >= len(unsent[0]):
            sent -= len(unsent.pop(0))
        if unsent and sent:
            unsent[0] = unsent[0][sent:]
        return full

    def _receive_done(self) -> int:
        return sum(len(payload) // ADD_DONE_ROW.size for payload in self._done_payloads())

    def _done_payloads(self) -> Iterator[bytes]:
        """Payloads of the AddDone frames of one read; every row says code 0."""
        count = self._socket.recv_into(self._buffer)
        if not count:
            raise SystemExit("bench: the bookie closed the connection")
        for header, payloads in self._parser.feed(bytes(memoryview(self._buffer)[:count])):
            if peek_number(header) != AddDone.NUMBER:
                raise SystemExit(f"bench: {decode_command(header)} instead of AddDone")
            for payload in payloads:
                if any(any(payload[place :: ADD_DONE_ROW.size]) for place in (16, 17, 18, 19)):
                    codes = {row[2] for row in ADD_DONE_ROW.iter_unpack(payload)}
                    raise SystemExit(f"bench: adds were refused with codes {sorted(codes)}")
                yield payload

    def add_paced(self, chunks: Sequence[Chunk], rate: float) -> list[tuple[float, float]]:
        """One chunk (of one add) every 1/rate seconds, whatever became of those before.

        Returns (when it was due, seconds from then until it was durable), in the order of the chunks. They are the entries
        n, n + 1, n + 2... of one ledger.
        """
        sock = self._socket
        sock.setblocking(False)
        first = _first_entry(chunks[0])
        found = [(0.0, 0.0)] * len(chunks)
        began = time.perf_counter()
        position = answered = 0
        unsent: list[memoryview] = []
        while answered < len(chunks):
            now = time.perf_counter()
            while position < len(chunks) and began + position / rate <= now:
                unsent += map(memoryview, chunks[position].pieces)
                position += 1
            if unsent:
                self._send(unsent)
            due = began + position / rate - time.perf_counter() if position < len(chunks) else 1.0
            if not select.select([sock], [sock] if unsent else [], [], max(0.0, due))[0]:
                continue
            payloads = list(self._done_payloads())
            now = time.perf_counter()
            for payload in payloads:
                for _, entry_id, _ in ADD_DONE_ROW.iter_unpack(payload):
                    sent_at = began + (entry_id - first) / rate
                    found[entry_id - first] = (sent_at, now - sent_at)
                    answered += 1
        sock.setblocking(True)
        return found

    # --- reads --------------------------------------------------------------------------------------------------------

    def request_all(self, requests: Sequence[bytes], *, depth: int) -> tuple[float, int, list[float]]:
        """Sends encoded requests (ids 1, 2, 3...), `depth` at a time: seconds, payload bytes received, latencies."""
        sent_at = [0.0] * len(requests)
        latencies: list[float] = []
        size = position = 0
        began = time.perf_counter()
        while len(latencies) < len(requests):
            batch = requests[position : position + depth - (position - len(latencies))]
            if batch:
                now = time.perf_counter()
                sent_at[position : position + len(batch)] = [now] * len(batch)
                position += len(batch)
                self._socket.sendall(b"".join(batch))
            count = self._socket.recv_into(self._buffer)
            if not count:
                raise SystemExit("bench: the bookie closed the connection")
            for header, payloads in self._parser.feed(bytes(memoryview(self._buffer)[:count])):
                command = decode_command(header)
                if isinstance(command, Failed):
                    raise SystemExit(f"bench: a read failed: {command.to_error()}")
                assert isinstance(command, Ok)
                now = time.perf_counter()
                for payload in payloads:
                    latencies.append(now - sent_at[command.request_id - 1])
                    size += len(payload)
        return time.perf_counter() - began, size, latencies


def _first_entry(chunk: Chunk) -> int:
    return int(struct.unpack_from(">Q", chunk.pieces[0], PREFIX_BYTES + 8)[0])


def _timed_out() -> list[tuple[int, int]]:
    raise SystemExit("bench: the bookie was silent for 30 s")
