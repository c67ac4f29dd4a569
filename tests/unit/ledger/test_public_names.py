"""The names that other rooms may use."""

import magnetar.ledger.public
import magnetar.metadata


def test_public_names_of_the_ledger() -> None:
    assert set(magnetar.ledger.public.__all__) == set(
        "AddCallback BookieDirectory BookieFacts BookieHealth BookieIdentities BookieInfoReader"
        " BookieTransport ConfirmCallback"
        " Ensemble EntryPage Labels LastConfirmed LongPollAnswer"
        " LedgerClient LedgerMetadata LedgerPage ListedLedger"
        "  LedgerReader LedgerSettings LedgerState LedgerTail LedgerWriter LocalTransport"
        " ReadResult"
        " GivenIdentities RegisteredBookies StaticBookies StoredIdentities TcpTransport".split()
    )
    assert all(hasattr(magnetar.ledger, name) for name in magnetar.ledger.public.__all__)


def test_public_names_of_the_metadata() -> None:
    assert set(magnetar.metadata.__all__) == set(
        "Check Create Delete MetadataStore Operation Put Session Versioned Watch".split()
    )
    assert all(hasattr(magnetar.metadata, name) for name in magnetar.metadata.__all__)
