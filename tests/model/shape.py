"""What is explored: how many of what, and how much may go wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """What is explored. `crashes` and `losses` are budgets for the whole run."""

    bookies: int = 3
    ensemble_size: int = 2
    write_quorum: int = 2
    ack_quorum: int = 2
    entries: int = 2
    recoverers: int = 1
    crashes: int = 1
    losses: int = 2
    writer_closes: bool = True
    # Whether answers to recoverers travel, too. Without it they are told when a bookie carries the request out, which with
    # one recoverer shows no less: from the fence on nobody else changes what a bookie has.
    late_answers: bool = False
    # Whether one connection's messages may overtake each other. TCP keeps their order, and bookies answer in it; what was
    # given up arrives whenever it likes in any case.
    overtaking: bool = False
    # Bookies of the first ensemble that fence the ledger by themselves, at any time or never: they are being repaired (rule
    # 9). Unlike a recovery they do not say so in the metadata. Only in the reduced world.
    repairs: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of all bookies; the first of them are the first ensemble."""
        return tuple("abcdefgh"[: self.bookies])

    @property
    def symmetric(self) -> bool:
        """Whether positions can be exchanged: every bookie of an ensemble has every entry."""
        return self.ensemble_size == self.write_quorum
