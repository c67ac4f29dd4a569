"""CRC32C as Pulsar's frames carry it: `0x0e01 | u32 crc | what it covers`, where a producer sends a checksum at all.

google-crc32c (Apache 2.0) and crc32c (LGPL) take the same time, both by SSE 4.2: 90 ns for 170 bytes, 0.04 ns a byte of
many; slicing off the first six bytes costs 50 ns more, and 0.02 ns a byte.
"""

from __future__ import annotations

from google_crc32c import value as crc32c

MAGIC = b"\x0e\x01"


def checksummed(data: bytes) -> bytes:
    """`data`, which is metadata and payload, with magic number and checksum in front if it has none yet."""
    return data if data[:2] == MAGIC else MAGIC + crc32c(data).to_bytes(4, "big") + data
