"""The helper process that reads archives for a broker: requests come through a socket, entries go back. Run as a script.

    arguments: descriptor of a stream socket | the paths of Python's libraries, a JSON array
    request:  u32 length of the rest | msgpack [topic, location, ledger, first entry, last entry, most bytes]
              ledger: [position id, stored id, first offset, entries, messages, size, first append ms, last append ms]
    answer:   u32 length of the rest | u32 length of the head | head | ledger entries
              head: msgpack [error, text, sizes of the entries]; error: "", "damaged" or "unavailable"

One request at a time. Libraries are imported with the first one. The end of the life line (descriptor 0) ends the process at
once, also while a file system lets it wait; the end of the socket ends it after what it does.
"""

import _thread
import functools
import json
import os
import socket
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magnetar.archive.entries import ArchivedEntries

LENGTH = struct.Struct(">I")
# Decoding should not compete with the broker for a processor.
NICENESS = 10
MISSING = (
    "archives cannot be read here: {error}; install pyarrow where the broker runs: pip install 'magnetar[archive]' "
    "(no restart is needed)"
)


def main(arguments: "list[str]") -> int:
    """Entry point of the script."""
    sys.path[:] = json.loads(arguments[1])
    _thread.start_new_thread(_watch, ())
    os.nice(NICENESS)
    with socket.socket(fileno=int(arguments[0])) as link, link.makefile("rb") as requests:
        while head := requests.read(LENGTH.size):  # less only at the end of the socket
            link.sendall(_answer(requests.read(*LENGTH.unpack(head))))
    return 0


def _watch() -> None:
    """The broker holds the other end of the life line and writes nothing."""
    while os.read(0, 1):
        pass
    os._exit(0)


def _answer(request: bytes) -> bytes:
    import msgspec

    from magnetar.proto.errors import EntryDamaged, MagnetarError

    kind = text = ""
    entries: list[bytes] = []
    try:
        entries = _read(*msgspec.msgpack.decode(request))
    except ImportError as error:
        kind, text = "unavailable", MISSING.format(error=error)
    except EntryDamaged as error:
        kind, text = "damaged", error.message
    except MagnetarError as error:
        kind, text = "unavailable", error.message
    head = msgspec.msgpack.encode([kind, text, [len(entry) for entry in entries]])
    size = LENGTH.size + len(head) + sum(map(len, entries))
    return b"".join((LENGTH.pack(size), LENGTH.pack(len(head)), head, *entries))


def _read(
    topic: str, location: str, ledger: "list[int]", first: int, last: int, max_bytes: int
) -> "list[bytes]":
    from magnetar.archive.entries import Place
    from magnetar.archive.ledgers import TopicLedger

    place = Place(topic, TopicLedger(*ledger, True, b"", location))  # type: ignore[call-arg, arg-type]
    return _archives().read(place, first, last, max_bytes)


@functools.cache
def _archives() -> "ArchivedEntries":
    """Remembers between requests what it has opened."""
    from magnetar.archive.entries import ArchivedEntries

    return ArchivedEntries()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
