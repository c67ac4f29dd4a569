"""Input from a file, a pipe or a terminal, as groups of lines or as a whole, without blocking the event loop."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator

from magnetar.proto.errors import MessageTooLarge, StorageFailed

BLOCK_BYTES = 256 * 1024
MAX_LINE_BYTES = 64 * 1024 * 1024


def open_input(path: str) -> int:
    """A descriptor to read from; "-" is standard input. Raises StorageFailed, which names the path."""
    try:
        descriptor = 0 if path == "-" else os.open(path, os.O_RDONLY)
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
    except OSError as error:
        raise StorageFailed(f"cannot read {_name(path)}: {error.strerror}") from None
    if is_directory:
        raise StorageFailed(f"cannot read {_name(path)}: it is a directory; name a file")
    return descriptor


def _name(path: str) -> str:
    return "standard input" if path == "-" else path


async def read_whole(descriptor: int, max_bytes: int) -> bytes:
    """Everything up to the end, as it is. Raises MessageTooLarge as soon as there is more, StorageFailed."""
    data = bytearray()
    async for block in _blocks(descriptor):
        data += block
        if len(data) > max_bytes:
            raise MessageTooLarge(
                f"the payload has more than {max_bytes} bytes, which is all that a message can have here; send it in parts, "
                "or from Python, by a producer with chunking=True"
            )
    return bytes(data)


async def read_lines(descriptor: int) -> AsyncIterator[list[bytes]]:
    """Groups of lines without their line ends. A last line without one counts. Raises MessageTooLarge, StorageFailed."""
    rest = b""
    async for block in _blocks(descriptor):
        lines = (rest + block).split(b"\n") if rest else block.split(b"\n")
        rest = lines.pop()
        if len(rest) > MAX_LINE_BYTES:
            raise MessageTooLarge(f"a line is longer than {MAX_LINE_BYTES} bytes: is this a text file?")
        if lines:
            yield [line.removesuffix(b"\r") for line in lines]
    if rest:
        yield [rest.removesuffix(b"\r")]


async def _blocks(descriptor: int) -> AsyncIterator[bytes]:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor):
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=BLOCK_BYTES)
        # A duplicate, since the transport closes what it was given.
        pipe = os.fdopen(os.dup(descriptor), "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while block := await reader.read(BLOCK_BYTES):
                yield block
        finally:
            transport.close()
    else:
        while block := _read(descriptor):
            yield block
            await asyncio.sleep(0)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, BLOCK_BYTES)
    except OSError as error:
        raise StorageFailed(f"cannot read the input: {error.strerror}") from None
