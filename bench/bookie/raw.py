"""What the machine does without a bookie: writes synced one after another, and the bare way from a socket to the disk.

`synced` is the raw rate that targets are held against: pwrite + fdatasync of equal groups into a zero-filled file.
`path` is what no bookie can pass on this machine: client process -> TCP -> ring -> writer process -> fdatasync, without
looking at a byte.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.probes import disk

PIECE_BYTES = 256 << 10
RING_BYTES = 32 << 20
PATH_BYTES = 256 << 20


def raw_probe(directory: Path, group_sizes: list[int], seconds: float) -> dict[str, Any]:
    """Bytes per second by group size ("synced"), of the bare path ("path") and of cold sequential reads ("cold_read")."""
    path = directory / "raw-probe"
    try:
        disk.zero_filled(path)
        return {
            "synced": {size: disk.synced_writes(path, size, seconds).bytes_per_s for size in group_sizes},
            "path": bare_path(path),
            "cold_read": disk.cold_read_bytes_per_s(path),
        }
    finally:
        path.unlink(missing_ok=True)


def bare_path(path: Path) -> float:
    """Bytes per second through a socket, a shared ring and a writer that syncs whatever is there."""
    context = multiprocessing.get_context("fork")
    ring = mmap(-1, RING_BYTES)
    announced, to_writer = context.Pipe(duplex=False)
    durable, from_writer = context.Pipe(duplex=False)
    listener = socket.create_server(("127.0.0.1", 0))
    writer = context.Process(target=_write, args=(path, ring, announced, from_writer))
    client = context.Process(target=_send, args=(listener.getsockname(),))
    writer.start()
    client.start()
    peer, _ = listener.accept()
    began = time.perf_counter()
    view, received, synced = memoryview(ring), 0, 0
    while synced < PATH_BYTES:
        while durable.poll(
            0 if received - synced + PIECE_BYTES <= RING_BYTES and received < PATH_BYTES else None
        ):
            synced = durable.recv()
            if synced == PATH_BYTES:
                break
        if received < PATH_BYTES:
            at = received % RING_BYTES
            received += peer.recv_into(view[at : min(RING_BYTES, at + PIECE_BYTES)])
            to_writer.send(received)
    seconds = time.perf_counter() - began
    to_writer.close()
    for process in (client, writer):
        process.kill()
        process.join()
    peer.close()
    listener.close()
    return PATH_BYTES / seconds


def _send(address: tuple[str, int]) -> None:
    data = bytes(1 << 20)
    with socket.create_connection(address) as sock:
        for _ in range(PATH_BYTES // len(data)):
            sock.sendall(data)


def _write(path: Path, ring: mmap, announced: Connection, durable: Connection) -> None:
    view, written = memoryview(ring), 0
    fd = os.open(path, os.O_RDWR)
    file_bytes = os.fstat(fd).st_size
    while written < PATH_BYTES:
        target = announced.recv()
        while announced.poll(0):
            target = announced.recv()
        while written < target:
            at = written % RING_BYTES
            part = view[at : min(RING_BYTES, at + target - written)]
            written += os.pwrite(fd, part, written % file_bytes)
        os.fdatasync(fd)
        durable.send(written)
