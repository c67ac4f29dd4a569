"""The public names of magnetar.ledger."""

from .bookie_info_reader import BookieInfoReader
from .client import LedgerClient
from .core.metadata import Ensemble, LedgerMetadata, LedgerState
from .core.outstanding_adds import AddCallback
from .directory import BookieDirectory, BookieFacts, Labels, RegisteredBookies, StaticBookies
from .health import BookieHealth
from .identities import BookieIdentities, GivenIdentities, StoredIdentities
from .local_transport import LocalTransport
from .reader import LedgerReader, LedgerTail
from .settings import LedgerSettings
from .tcp_transport import TcpTransport
from .transport import (
    BookieTransport,
    EntryPage,
    LastConfirmed,
    LedgerPage,
    ListedLedger,
    LongPollAnswer,
    ReadResult,
)
from .writer import ConfirmCallback, LedgerWriter

__all__ = [
    "AddCallback",
    "BookieDirectory",
    "BookieFacts",
    "BookieHealth",
    "BookieIdentities",
    "BookieInfoReader",
    "BookieTransport",
    "ConfirmCallback",
    "Ensemble",
    "EntryPage",
    "GivenIdentities",
    "Labels",
    "LastConfirmed",
    "LedgerClient",
    "LedgerMetadata",
    "LedgerPage",
    "LedgerReader",
    "LedgerSettings",
    "LedgerState",
    "LedgerTail",
    "LedgerWriter",
    "ListedLedger",
    "LocalTransport",
    "LongPollAnswer",
    "ReadResult",
    "RegisteredBookies",
    "StaticBookies",
    "StoredIdentities",
    "TcpTransport",
]
