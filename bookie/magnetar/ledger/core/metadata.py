"""Ledger metadata: what the metadata store keeps of a ledger, as a msgpack map under /ledgers/<id>.

    OPEN ──> IN_RECOVERY ──> CLOSED        each step by compare-and-set on the node's version (rule 16)
      └──────────────────────────^        (a writer closes its own ledger)

`ensembles` lists (first entry, bookies): entries from there up to the next one's first are stored on these bookies. The
last ensemble may be empty (its first entry above the ledger's last one) when a change came right before the end.
Keys that this release does not know are preserved and written back.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack

from magnetar.proto.errors import FinalError, InvalidSetting
from magnetar.proto.ledger_entry import NO_ENTRY

from .quorum import Striping, check_quorums

Bookies = tuple[str, ...]

# Its tables are asked for by each read and each recovery, cost 20 us to make, and are the same for most ledgers of a
# service. Nothing changes a Striping.
_striping = lru_cache(maxsize=256)(Striping)


class LedgerState(enum.IntEnum):
    """Stored numbers; never reused."""

    OPEN = 1
    IN_RECOVERY = 2
    CLOSED = 3


@dataclass(frozen=True, slots=True)
class Ensemble:
    """The bookies of the entries from `first_entry` on."""

    first_entry: int
    bookies: Bookies  # as many as ensemble_size, each once


class Fragment(NamedTuple):
    """Entries `first` to `last`, both included, on one ensemble. `last` is None in the last one of a ledger that is open."""

    first: int
    last: int | None
    bookies: Bookies

    @property
    def empty(self) -> bool:
        """Whether it is certain that it has no entries, and never will."""
        return self.last is not None and self.last < self.first


@dataclass(frozen=True, slots=True)
class LedgerMetadata:
    """One version of a ledger's metadata. Change it by the methods, which keep what `check` says."""

    state: LedgerState
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    ensembles: tuple[Ensemble, ...]  # first entries rise strictly from 0
    created_at_ms: int
    last_entry: int = NO_ENTRY  # known once CLOSED; -1: empty
    length: int = 0  # payload bytes; known once CLOSED
    properties: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, Any] = field(default_factory=dict)  # keys of later releases

    @classmethod
    def create(
        cls, striping: Striping, bookies: Bookies, created_at_ms: int, properties: Mapping[str, str]
    ) -> LedgerMetadata:
        """A new, open ledger."""
        metadata = cls(
            LedgerState.OPEN,
            striping.ensemble_size,
            striping.write_quorum,
            striping.ack_quorum,
            (Ensemble(0, bookies),),
            created_at_ms,
            properties=dict(properties),
        )
        metadata.check()
        return metadata

    @property
    def striping(self) -> Striping:
        """The quorum arithmetic of this ledger."""
        return _striping(self.ensemble_size, self.write_quorum, self.ack_quorum)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, Qw, Qa."""
        return self.ensemble_size, self.write_quorum, self.ack_quorum

    @property
    def closed(self) -> bool:
        """Whether last entry and length are final."""
        return self.state is LedgerState.CLOSED

    @property
    def last_ensemble(self) -> Ensemble:
        """The ensemble that is written to."""
        return self.ensembles[-1]

    def ensemble_of(self, entry_id: int) -> Ensemble:
        """The ensemble that holds the entry."""
        for ensemble in reversed(self.ensembles):
            if ensemble.first_entry <= entry_id:
                return ensemble
        raise AssertionError(f"entry {entry_id} lies before the first ensemble")

    def end_of_ensemble(self, entry_id: int) -> int | None:
        """Last entry of the ensemble that holds this one; None if it is the last ensemble."""
        following = [e.first_entry for e in self.ensembles if e.first_entry > entry_id]
        return following[0] - 1 if following else None

    def fragments(self) -> list[Fragment]:
        """All fragments, in order of their entries. The last one of a closed ledger may be empty."""
        ends: list[int | None] = [ensemble.first_entry - 1 for ensemble in self.ensembles[1:]]
        ends.append(self.last_entry if self.closed else None)
        return [
            # A ledger can be closed below an ensemble that was recorded before: then entries end in an earlier one.
            Fragment(
                ensemble.first_entry,
                min(end, self.last_entry) if end is not None and self.closed else end,
                ensemble.bookies,
            )
            for ensemble, end in zip(self.ensembles, ends, strict=True)
        ]

    def with_ensemble(self, first_entry: int, bookies: Bookies) -> LedgerMetadata:
        """Entries from `first_entry` on go to `bookies`; replaces an ensemble recorded for the same entry (rule 17)."""
        unchanged = tuple(e for e in self.ensembles if e.first_entry < first_entry)
        assert len(unchanged) >= len(self.ensembles) - 1, (
            "an ensemble change never reaches behind the last ensemble"
        )
        changed = replace(self, ensembles=(*unchanged, Ensemble(first_entry, bookies)))
        changed.check()
        return changed

    def with_replaced(self, first_entry: int, bookies: Mapping[int, str]) -> LedgerMetadata:
        """The ensemble that begins at `first_entry` has these bookies, by position; a repair copied its entries there."""
        assert self.closed or first_entry < self.last_ensemble.first_entry, (
            "the last ensemble is the writer's"
        )
        ensembles = tuple(
            Ensemble(first_entry, tuple(bookies.get(position, old) for position, old in enumerate(e.bookies)))
            if e.first_entry == first_entry
            else e
            for e in self.ensembles
        )
        changed = replace(self, ensembles=ensembles)
        changed.check()
        return changed

    def in_recovery(self) -> LedgerMetadata:
        """Marked: its writer must stop."""
        assert self.state is LedgerState.OPEN
        return replace(self, state=LedgerState.IN_RECOVERY)

    def close(self, last_entry: int, length: int) -> LedgerMetadata:
        """Sealed for good."""
        assert not self.closed
        changed = replace(self, state=LedgerState.CLOSED, last_entry=last_entry, length=length)
        changed.check()
        return changed

    def check(self) -> None:
        """Asserts the invariants."""
        check_quorums(self.ensemble_size, self.write_quorum, self.ack_quorum)
        firsts = [ensemble.first_entry for ensemble in self.ensembles]
        assert firsts, "no ensemble"
        assert firsts[0] == 0, firsts
        assert all(a < b for a, b in itertools.pairwise(firsts)), firsts
        for ensemble in self.ensembles:
            assert len(ensemble.bookies) == self.ensemble_size, ensemble
            assert len(set(ensemble.bookies)) == self.ensemble_size, ensemble
        assert self.closed or (self.last_entry == NO_ENTRY and self.length == 0)
        assert self.last_entry >= NO_ENTRY
        assert self.last_entry > NO_ENTRY or self.length == 0

    def encode(self) -> bytes:
        """The node's value."""
        data: bytes = msgpack.packb(
            {
                **self.unknown,
                "state": int(self.state),
                "ensemble_size": self.ensemble_size,
                "write_quorum": self.write_quorum,
                "ack_quorum": self.ack_quorum,
                "ensembles": [[e.first_entry, list(e.bookies)] for e in self.ensembles],
                "created_at_ms": self.created_at_ms,
                "last_entry": self.last_entry,
                "length": self.length,
                "properties": dict(self.properties),
            }
        )
        return data

    @classmethod
    def decode(cls, data: bytes, ledger_id: int) -> LedgerMetadata:
        """Inverse of `encode`. Raises FinalError when the value is not ledger metadata."""
        try:
            fields = msgpack.unpackb(data)
            metadata = cls(
                LedgerState(fields.pop("state")),
                fields.pop("ensemble_size"),
                fields.pop("write_quorum"),
                fields.pop("ack_quorum"),
                tuple(Ensemble(first, tuple(bookies)) for first, bookies in fields.pop("ensembles")),
                fields.pop("created_at_ms"),
                fields.pop("last_entry"),
                fields.pop("length"),
                fields.pop("properties"),
                fields,
            )
            metadata.check()
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, InvalidSetting) as error:
            raise FinalError(
                f"the metadata of ledger {ledger_id} is damaged ({type(error).__name__}: {error}); "
                "restore the metadata store from a backup",
                ledger_id=ledger_id,
            ) from None
        return metadata
