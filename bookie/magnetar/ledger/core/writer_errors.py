"""The errors of a writer that takes no more appends."""

from __future__ import annotations

from collections.abc import Mapping

from magnetar.proto.errors import (
    ERRORS_BY_CODE,
    AlreadyClosed,
    FrameTooLarge,
    LedgerFenced,
    LedgerNotFound,
    MessageTooLarge,
    NotEnoughBookies,
)

from .metadata import Bookies, LedgerState

# Codes of an entry that the bookie, or the connection to it, does not take for its size.
TOO_LARGE = frozenset((MessageTooLarge.code, FrameTooLarge.code))


def fenced_at(ledger_id: int, bookie: str) -> LedgerFenced:
    """A bookie answered an add with LedgerFenced."""
    return LedgerFenced(f"ledger {ledger_id} was fenced at bookie {bookie}", ledger_id=ledger_id)


def taken_over(ledger_id: int, found: LedgerState) -> LedgerFenced:
    """The metadata has another owner. OPEN: only a bookie is fenced, by an unfinished recovery or its own repair."""
    if found is LedgerState.OPEN:
        return LedgerFenced(
            f"ledger {ledger_id} is fenced at a bookie, though OPEN in the metadata: this writer must stop; whoever opens "
            "the ledger with recovery closes it",
            ledger_id=ledger_id,
        )
    return LedgerFenced(
        f"ledger {ledger_id} is {found.name} in the metadata: another owner took over, this one must stop",
        ledger_id=ledger_id,
    )


def ensemble_changed_by_other(ledger_id: int) -> LedgerFenced:
    """The metadata has an ensemble that this writer did not write."""
    return LedgerFenced(f"another writer changed the ensemble of ledger {ledger_id}", ledger_id=ledger_id)


def too_large(ledger_id: int, entry_id: int, bookie: str) -> MessageTooLarge:
    """No bookie will take this entry."""
    return MessageTooLarge(
        f"entry {entry_id} of ledger {ledger_id} is larger than bookie {bookie} takes: raise [bookie] max_entry_bytes, "
        "or send smaller messages",
        ledger_id=ledger_id,
        entry_id=entry_id,
    )


def not_enough_bookies(
    ledger_id: int, bookies: Bookies, failing: Mapping[int, int], reason: str
) -> NotEnoughBookies:
    """`failing`: position -> error code."""
    failed = ", ".join(
        f"{bookies[position]} ({getattr(ERRORS_BY_CODE.get(code), '__name__', code)})"
        for position, code in sorted(failing.items())
    )
    return NotEnoughBookies(f"ledger {ledger_id} lost bookie {failed} and found no replacement: {reason}")


def deleted(ledger_id: int) -> LedgerNotFound:
    """This very client deleted it."""
    return LedgerNotFound(f"ledger {ledger_id} was deleted", ledger_id=ledger_id)


def left_open(ledger_id: int) -> AlreadyClosed:
    """Its owner detached it."""
    return AlreadyClosed(f"ledger {ledger_id} was left open by its writer; a recovery closes it")
