"""Frames: `u32 length | u16 header length | header | payload`, big-endian; `length` counts all that follows it.

The header is a msgpack array (`commands`), the payload opaque bytes. `FrameParser` is sans-I/O: bytes in, *runs* out.
A run is a header and the payloads of consecutive frames that had exactly this header, because what a busy connection
carries (the SENDs of one producer, the adds of one ledger client) repeats its header to the byte, and handling a run
costs one look-up instead of one per frame.

>>> parser = FrameParser(max_frame_bytes=1024)
>>> parser.feed(encode_frame(b"h", b"one") + encode_frame(b"h", b"two") + encode_frame(b"g", b"")[:3])
[(b'h', [b'one', b'two'])]
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from .errors import FrameTooLarge, MalformedFrame

_PREFIX = struct.Struct(">IH")
_PREFIX_BYTES = _PREFIX.size
DEFAULT_MAX_MESSAGE_BYTES = 5 * 1024 * 1024
FRAME_OVERHEAD_BYTES = 64 * 1024
DEFAULT_MAX_FRAME_BYTES = DEFAULT_MAX_MESSAGE_BYTES + FRAME_OVERHEAD_BYTES
MAX_HEADER_BYTES = 65_535

# A peer that sends a frame in pieces of two bytes would otherwise make us hold twenty times its size.
_MAX_PARTS = 1024

Run = tuple[bytes, list[bytes]]


def frame_prefix(header: bytes, payload_bytes: int) -> bytes:
    """Length fields and header of a frame whose payload of `payload_bytes` bytes is written after it.

    Raises FrameTooLarge for what the length fields have no room for.
    """
    try:
        return _PREFIX.pack(2 + len(header) + payload_bytes, len(header)) + header
    except struct.error:
        raise FrameTooLarge(
            f"a frame header of {len(header)} bytes and a payload of {payload_bytes} do not fit into a frame; "
            f"a header has at most {MAX_HEADER_BYTES}",
            length=2 + len(header) + payload_bytes,
        ) from None


def encode_frame(header: bytes, payload: bytes = b"") -> bytes:
    """One whole frame."""
    return frame_prefix(header, len(payload)) + payload


def encode_frames(header: bytes, payloads: Sequence[bytes]) -> bytes:
    """Frames with one header and many payloads, as one bytes object to write at once."""
    size = 2 + len(header)
    pack, count = _PREFIX.pack, len(header)
    parts: list[bytes] = []
    for payload in payloads:
        parts += (pack(size + len(payload), count), header, payload)
    return b"".join(parts)


class FrameParser:
    """Cuts a byte stream into runs of frames. Payloads are copies, so they pin no receive buffer.

    A bad frame ends the stream, since no border is known after it: `error` is set, `feed` returns what came before it
    and nothing afterwards, and the connection must be closed.
    """

    __slots__ = ("_missing", "_parts", "error", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes  # counted after the length field
        self._parts: list[bytes] = []
        # Bytes that the unfinished frame in _parts still lacks (at least; 1 while its prefix is incomplete).
        self._missing = 0
        self.error: FrameTooLarge | MalformedFrame | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished frame that are held."""
        return sum(map(len, self._parts))

    def feed(self, data: bytes) -> list[Run]:
        """Returns the runs that `data` completes; look at `error` after each call."""
        if self.error is not None:
            return []
        if self._parts:
            if len(data) < self._missing:
                self._parts.append(data)
                self._missing -= len(data)
                if len(self._parts) >= _MAX_PARTS:
                    self._parts = [b"".join(self._parts)]
                return []
            return self._cut(*self._complete(data))
        return self._cut(data, 0, [], None, [])

    def _complete(self, data: bytes) -> tuple[bytes, int, list[Run], bytes | None, list[bytes]]:
        """The unfinished frame and `data`, which may end it, as the arguments of `_cut`.

        The payload is joined straight from its pieces: a frame of 128 KB that came in three is copied once, not three times.
        """
        parts, self._parts = self._parts, []
        first = parts[0]
        length, header_length = _PREFIX.unpack_from(first) if len(first) >= _PREFIX_BYTES else (0, 0)
        body = _PREFIX_BYTES + header_length
        if not length or len(first) < body:
            return b"".join((*parts, data)), 0, [], None, []
        taken = self._missing
        header = first[_PREFIX_BYTES:body]
        payloads = [b"".join((memoryview(first)[body:], *parts[1:], memoryview(data)[:taken]))]
        return data, taken, [(header, payloads)], header, payloads

    def _cut(
        self, data: bytes, position: int, runs: list[Run], last_header: bytes | None, payloads: list[bytes]
    ) -> list[Run]:
        """Adds the frames of `data` from `position` on to `runs`, whose last one has `last_header` and `payloads`."""
        end, limit = len(data), self.max_frame_bytes
        unpack_from = _PREFIX.unpack_from
        # About 0.45 us a frame of 150 bytes; a copy of such a slice is cheaper than a memoryview of it.
        while end - position >= 6:
            length, header_length = unpack_from(data, position)
            if length > limit or header_length + 2 > length:
                self.error = self._bad_frame(length, header_length)
                return runs
            body = position + 6 + header_length
            following = position + 4 + length
            if following > end:
                break
            header = data[position + 6 : body]
            if header != last_header:
                payloads = []
                runs.append((header, payloads))
                last_header = header
            payloads.append(data[body:following])
            position = following
        if position < end:
            rest = data[position:] if position else data
            self._parts = [rest]
            self._missing = 1 if end - position < 6 else unpack_from(data, position)[0] + 4 - (end - position)
        return runs

    def _bad_frame(self, length: int, header_length: int) -> MalformedFrame | FrameTooLarge:
        if length > self.max_frame_bytes:
            return FrameTooLarge(
                f"a frame of {length} bytes exceeds the limit of {self.max_frame_bytes}; "
                "send smaller messages or raise max_message_bytes",
                length=length,
            )
        return MalformedFrame(f"a frame of {length} bytes cannot hold a header of {header_length} bytes")
