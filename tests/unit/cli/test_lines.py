"""Lines of files and pipes, and whole ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from magnetar.cli.commands import lines
from magnetar.cli.commands.lines import open_input, read_lines, read_whole
from magnetar.proto.errors import MessageTooLarge, StorageFailed


async def read(descriptor: int) -> list[bytes]:
    return [line async for group in read_lines(descriptor) for line in group]


@pytest.mark.real
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\n\nb\n", [b"a", b"", b"b"]),
        (b"x" * 70_000 + b"\ny\n", [b"x" * 70_000, b"y"]),
    ],
)
@pytest.mark.parametrize("source", ["file", "pipe"])
async def test_lines(text: bytes, expected: list[bytes], source: str, tmp_path: Path) -> None:
    pid = 0
    if source == "file":
        path = tmp_path / "lines"
        path.write_bytes(text)
        descriptor = os.open(path, os.O_RDONLY)
    else:
        descriptor, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(descriptor)
            with os.fdopen(write_end, "wb") as pipe:
                pipe.write(text)
            os._exit(0)
        os.close(write_end)
    try:
        assert await read(descriptor) == expected
    finally:
        os.close(descriptor)
        if pid:
            os.waitpid(pid, 0)


async def test_lines_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 3)
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n\nthree")
    with path.open("rb") as file:
        assert await read(file.fileno()) == [b"one", b"two", b"", b"three"]


async def test_a_line_without_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "binary"
    path.write_bytes(bytes(5000))
    with path.open("rb") as file, pytest.raises(MessageTooLarge):
        await read(file.fileno())


def test_inputs_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match=f"cannot read {tmp_path}: it is a directory; name a file"):
        open_input(str(tmp_path))
    with pytest.raises(StorageFailed, match=f"cannot read {tmp_path}/none: No such file or directory"):
        open_input(str(tmp_path / "none"))


async def test_a_whole_file_is_as_it_is_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "payload"
    path.write_bytes(data := b"\xff\n\r\n" * 100_000)
    for limit, fits in ((len(data), True), (len(data) - 1, False)):
        descriptor = open_input(str(path))
        if fits:
            assert await read_whole(descriptor, limit) == data
        else:
            with pytest.raises(MessageTooLarge, match=f"more than {limit} bytes"):
                await read_whole(descriptor, limit)
        os.close(descriptor)


async def test_input_that_cannot_be_read() -> None:
    descriptor = os.open("/proc/self/mem", os.O_RDONLY)
    with pytest.raises(StorageFailed, match="cannot read the input: Input/output error"):
        await read(descriptor)
    os.close(descriptor)
