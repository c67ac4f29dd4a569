"""What the writers, readers, recoveries and repairs of one ledger client share."""

from __future__ import annotations

from dataclasses import dataclass

from .directory import BookieDirectory
from .health import BookieHealth
from .placement.chooser import BookieChooser
from .records import LedgerRecords
from .settings import LedgerSettings
from .transport import BookieTransport


@dataclass(frozen=True, slots=True)
class LedgerComponents:
    """The owner of the client owns the transport, the directory, and the store of the records."""

    records: LedgerRecords
    transport: BookieTransport
    bookies: BookieDirectory
    chooser: BookieChooser
    health: BookieHealth
    settings: LedgerSettings
