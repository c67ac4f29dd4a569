"""What tells the parts of worlds apart, by numbers instead of the names of bookies."""

from __future__ import annotations

import functools
from typing import Any

from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.core.recovery import RecoveryCore, RecoveryState
from magnetar.ledger.core.writer import WriterCore
from magnetar.proto.errors import LedgerFenced
from magnetar.proto.ledger_entry import decode_ledger_entry_header


@functools.cache
def lac_of(entry: bytes) -> int:
    """The piggybacked one."""
    return decode_ledger_entry_header(entry).last_add_confirmed


def metadata_key(metadata: LedgerMetadata, number: dict[str, int], symmetric: bool) -> tuple[Any, ...]:
    ensembles = tuple((e.first_entry, set_key(e.bookies, number, symmetric)) for e in metadata.ensembles)
    return (int(metadata.state), ensembles, metadata.last_entry, metadata.length)


def set_key(bookies: tuple[str, ...], number: dict[str, int], symmetric: bool) -> tuple[int, ...]:
    numbers = tuple([number[name] for name in bookies])
    return tuple(sorted(numbers)) if symmetric else numbers


def message_key(message: tuple[Any, ...], number: dict[str, int], symmetric: bool) -> tuple[Any, ...]:
    kind, client = message[:2]
    if kind in "mM":
        value = message[2]
        body: tuple[Any, ...]
        if isinstance(value, LedgerMetadata):
            body = (2, *metadata_key(value, number, symmetric))
        else:
            body = (0,) if value is None else (1,)
        return (kind, client, -1, body, *message[3:])
    rest = tuple((lac_of(part) if part else -2) if isinstance(part, bytes) else part for part in message[3:])
    return (kind, client, number[message[2]], (), *rest)


def bits_key(bits: int, bookies: tuple[str, ...], number: dict[str, int]) -> tuple[int, ...]:
    """Positions as bookies."""
    return tuple(sorted(number[name] for position, name in enumerate(bookies) if bits >> position & 1))


def writer_key(core: WriterCore, number: dict[str, int], symmetric: bool) -> tuple[Any, ...]:
    bookies = tuple(core._bits)
    changing = core._changing_to
    return (
        core.state.value,
        core.close_requested,
        core.error is None,
        isinstance(core.error, LedgerFenced),
        core.last_add_confirmed,
        core.version,
        core._first_held,
        core._writing_metadata,
        tuple(bits_key(add.acked, bookies, number) for add in core.pending),
        tuple(lac_of(add.entry) for add in core.pending),
        tuple(sorted(number[name] for name in core.failed_bookies)),
        tuple(sorted(number[bookies[position]] for position in core._failing)),
        tuple(sorted(number[bookies[position]] for position in core._replaced)),
        set_key(bookies, number, symmetric),
        () if changing is None else set_key(changing, number, symmetric),
        metadata_key(core.metadata, number, symmetric),
    )


def recovery_key(core: RecoveryCore | None, number: dict[str, int], symmetric: bool) -> tuple[Any, ...]:
    if core is None:
        return ()
    if core.state is RecoveryState.DONE:
        return ("done",)
    changed = core._changed.last_ensemble.bookies
    entries = tuple(
        (
            entry_id,
            -2 if found.entry is None else lac_of(found.entry),
            found.negatives,
            tuple(sorted(number[name] for name in found.answered)),
            len(found.codes),
            bits_key(found.asked, core._reading, number),
            bits_key(found.acked, changed, number),
        )
        for entry_id, found in core._entries.items()
    )
    return (
        core.state.value,
        core.starts,
        core.version,
        metadata_key(core.metadata, number, symmetric),
        metadata_key(core._changed, number, symmetric),
        set_key(core._reading, number, symmetric),
        (
            core._quorum.last_add_confirmed,
            bits_key(core._quorum._known, core._reading, number),
            tuple(sorted(number[name] for name in core._quorum._unknown)),
        ),
        (core._base, core._first, core._next_read, core._next_add, core._length),
        -2 if core._last is None else core._last,
        tuple(number[name] for name in core._base_replicas),
        len(core._base_codes),
        tuple(sorted(number[name] for name in core._suspects)),
        entries,
        tuple(sorted(number[changed[position]] for position in core._failing)),
        tuple(sorted(number[changed[position]] for position in core._unreplaceable)),
        tuple(sorted(number[name] for name in core._excluded)),
    )
