"""`/bundle-loads/NAME`: what a broker says about its busiest bundles (FORMATS.md)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from magnetar.metadata.store import MAX_VALUE_BYTES
from magnetar.proto.errors import DataDirectoryError

from .core.facts import BundleLoad

BUNDLE_LOADS_PATH = "/bundle-loads"
_FORMAT = 1


class _BundleLoads(msgspec.Struct, tag_field="format", tag=_FORMAT):
    bundles: list[BundleLoad]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_BundleLoads).decode


def bundle_loads_path(broker: str) -> str:
    """Of a broker's node."""
    return f"{BUNDLE_LOADS_PATH}/{broker}"


def encode_bundle_loads(rows: Sequence[BundleLoad]) -> bytes:
    """The value; with very long names, of the first rows that fit into a node."""
    rows = list(rows)
    while len(value := _encode(_BundleLoads(rows))) > MAX_VALUE_BYTES:
        rows = rows[: len(rows) // 2]
    return value


def decode_bundle_loads(value: bytes, path: str) -> list[BundleLoad]:
    """The rows. Raises DataDirectoryError."""
    try:
        return _decode(value).bundles
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataDirectoryError(
            f"the metadata of {path} is damaged or of another release than format {_FORMAT}: {error}"
        ) from error
