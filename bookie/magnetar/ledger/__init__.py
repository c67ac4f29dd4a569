"""The ledger client: replicated, append-only ledgers over bookies, with the protocol in the client as in BookKeeper.

`core` decides without I/O; `client`, `writer`, `reader` and `recover` are its asyncio shells; `transport` is the seam to
bookies, `tcp_transport` and `local_transport` are what stands behind it.
"""

from .client import LedgerClient
from .core.metadata import Ensemble, LedgerMetadata, LedgerState
from .directory import BookieDirectory, RegisteredBookies, StaticBookies
from .local_transport import LocalTransport
from .placement import Placement, RandomPlacement
from .reader import LedgerReader
from .settings import LedgerSettings
from .tcp_transport import TcpTransport
from .transport import (
    AddCallback,
    BookieTransport,
    EntryPage,
    LastConfirmed,
    LastConfirmedNews,
    LedgerPage,
    ListedLedger,
    ReadResult,
)
from .writer import ConfirmCallback, LedgerWriter

__all__ = [
    "AddCallback",
    "BookieDirectory",
    "BookieTransport",
    "ConfirmCallback",
    "Ensemble",
    "EntryPage",
    "LastConfirmed",
    "LastConfirmedNews",
    "LedgerClient",
    "LedgerMetadata",
    "LedgerPage",
    "LedgerReader",
    "LedgerSettings",
    "LedgerState",
    "LedgerWriter",
    "ListedLedger",
    "LocalTransport",
    "Placement",
    "RandomPlacement",
    "ReadResult",
    "RegisteredBookies",
    "StaticBookies",
    "TcpTransport",
]
