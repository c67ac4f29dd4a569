"""What is asked for one under-replicated ledger: the value of a node of the queue (see `replication.queue`).

{"format": 1, "bookies": {bookie id: reason}, "placement": bool, "since_ms": when it was queued, "note": text}
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgpack

from magnetar.proto.errors import InvalidArgument

_FORMAT = 1


class Reason(enum.StrEnum):
    """Why a bookie's copies of a ledger have to be looked at."""

    LOST = "lost"  # it vanished: replace it
    DRAINING = "draining"  # an operator drains it: replace it, it serves as a source
    CHECK = "check"  # it is there, and may lack entries: write those again


# A stronger reason replaces a weaker one of the same bookie.
_STRENGTH = {Reason.CHECK: 0, Reason.DRAINING: 1, Reason.LOST: 2}


@dataclass(frozen=True, slots=True)
class RepairRequest:
    """What is asked for one ledger."""

    bookies: Mapping[str, Reason] = field(default_factory=dict)
    placement: bool = False
    since_ms: int = 0
    note: str = ""

    def merged(self, other: RepairRequest) -> RepairRequest:
        """Both requests in one; the same object if `other` asks for nothing new."""
        bookies = dict(self.bookies)
        for bookie, reason in other.bookies.items():
            known = bookies.get(bookie)
            if known is None or _STRENGTH[reason] > _STRENGTH[known]:
                bookies[bookie] = reason
        if bookies == self.bookies and (self.placement or not other.placement):
            return self
        return replace(self, bookies=bookies, placement=self.placement or other.placement)

    def encode(self) -> bytes:
        """The value of the node."""
        data: bytes = msgpack.packb(
            {
                "format": _FORMAT,
                "bookies": {bookie: str(reason) for bookie, reason in self.bookies.items()},
                "placement": self.placement,
                "since_ms": self.since_ms,
                "note": self.note,
            }
        )
        return data

    @classmethod
    def decode(cls, data: bytes) -> RepairRequest:
        """Inverse of `encode`. InvalidArgument."""
        try:
            fields = msgpack.unpackb(data)
            if fields["format"] != _FORMAT:
                raise InvalidArgument(
                    f"a request of the repair queue has format {fields['format']}; upgrade magnetar"
                )
            bookies = {str(bookie): Reason(reason) for bookie, reason in fields["bookies"].items()}
            return cls(bookies, bool(fields["placement"]), int(fields["since_ms"]), str(fields["note"]))
        except InvalidArgument:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise InvalidArgument(
                f"a request of the repair queue cannot be read ({error!r}); delete its node and run a full check"
            ) from error
