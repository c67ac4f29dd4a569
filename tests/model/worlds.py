"""The worlds that `make model` explores, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .shape import Shape


@dataclass(frozen=True, slots=True)
class Named:
    """A world of the default set, or a long one."""

    name: str
    shape: Shape
    long: bool = False

    @property
    def text(self) -> str:
        """What is in it, for a table."""
        shape = self.shape
        extras = [
            word
            for word, there in (
                ("late answers", shape.late_answers),
                ("overtaking", shape.overtaking),
                ("a repair", shape.repairs),
                ("no close", not shape.writer_closes),
            )
            if there
        ]
        return (
            f"{shape.bookies} bookies {shape.ensemble_size}/{shape.write_quorum}/{shape.ack_quorum}, {shape.entries}e "
            f"{1 + shape.recoverers}c {shape.crashes}+{shape.losses}{''.join(f', {e}' for e in extras)}"
        )


_TWO = Shape(entries=2, recoverers=1, crashes=1, losses=2)
_THREE = replace(_TWO, recoverers=2)
# Of the default set those that take longest first, so that two processes end together; of the long ones, last. The first is
# scorecard 6.
WORLDS = [
    Named("scorecard-6", _THREE),
    Named("two-clients", _TWO),
    Named("qa-1", replace(_TWO, ack_quorum=1, losses=1)),
    Named("striped-3-2-2", replace(_TWO, ensemble_size=3, losses=1)),
    Named("repair", replace(_TWO, losses=1, repairs=1)),
    Named("three-clients-repair", replace(_THREE, crashes=0, losses=1, repairs=1)),
    Named("one-entry", replace(_THREE, entries=1)),
    Named("no-spare-3-3-2", replace(_TWO, ensemble_size=3, write_quorum=3, entries=1)),
    Named("three-clients-3-3-2", replace(_THREE, ensemble_size=3, write_quorum=3, entries=1, losses=1)),
    Named("three-clients-striped", replace(_THREE, ensemble_size=3, crashes=0, losses=1)),
    Named("three-clients-late-answers", replace(_THREE, entries=1, losses=1, late_answers=True)),
    Named("overtaking", replace(_TWO, crashes=0, losses=1, overtaking=True)),
    Named("4-bookies", replace(_TWO, bookies=4, crashes=0, losses=1)),
    Named("3-entries", replace(_TWO, entries=3, crashes=0, losses=0)),
    Named("striped-3-2-2-two-losses", replace(_TWO, ensemble_size=3), True),
    Named("striped-3-2-2-three-clients", replace(_THREE, ensemble_size=3, losses=1), True),
    Named("repair-three-clients", replace(_THREE, repairs=1), True),
    Named("overtaking-three-clients", replace(_THREE, losses=1, overtaking=True), True),
    Named("no-spare-3-3-2-2-entries", replace(_TWO, ensemble_size=3, write_quorum=3, losses=1), True),
    Named("late-answers-three-clients", replace(_THREE, losses=1, late_answers=True), True),
    Named("qa-1-two-losses", replace(_TWO, ack_quorum=1), True),
    Named("4-bookies-three-clients", replace(_THREE, bookies=4), True),
    Named("3-entries-two-clients", replace(_TWO, entries=3, losses=1), True),
    Named("3-entries-three-clients", replace(_THREE, entries=3, crashes=1, losses=1), True),
    Named("qa-1-three-clients", replace(_THREE, ack_quorum=1, losses=1), True),
    Named("scorecard-6-long", replace(_THREE, bookies=4, entries=3), True),
]
