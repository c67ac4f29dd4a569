"""The figures of a run as the JSON files of all benchmarks have them, so that two runs can be compared: bench.compare.

"figures": {"a": {"label": "(a) unbatched 100 B, with tail", "unit": "msg/s", "higher": true, "rounds": [303117.2]}}
"others": 0.04
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """What was measured in each round; `higher` values are better, or lower ones."""

    label: str
    unit: str
    higher: bool
    rounds: list[float]


class Run(NamedTuple):
    """What a benchmark's JSON file says for comparisons; `others`: the share of the cores that others used, 0.0 to 1.0."""

    figures: dict[str, Figure]
    others: float


def read_run(document: Mapping[str, Any]) -> Run:
    """Of a JSON file. Raises ValueError when the benchmark that wrote it does not say what a comparison needs."""
    try:
        figures = {
            name: Figure(
                found["label"], found["unit"], bool(found["higher"]), list(map(float, found["rounds"]))
            )
            for name, found in document["figures"].items()
            if found.get("compared", True)
        }
        return Run(figures, float(document["others"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the file of the benchmark has no figures to compare ({type(error).__name__}: {error}); the benchmark that "
            "wrote it is older than comparisons are"
        ) from None


class Gathered:
    """Figures that are gathered round by round."""

    def __init__(self) -> None:
        self._figures: dict[str, Figure] = {}

    def add(self, name: str, value: float, label: str, unit: str, *, higher: bool = False) -> None:
        """The next round's value of the figure."""
        self._figures.setdefault(name, Figure(label, unit, higher, [])).rounds.append(value)

    def document(self) -> dict[str, dict[str, Any]]:
        """For the JSON file."""
        return {name: figure._asdict() for name, figure in self._figures.items()}
