"""The table of a comparison, and its JSON file."""

from __future__ import annotations

import json
import platform
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.compare.driver import Part
from bench.compare.verdict import BETTER, FEW, MOST_ROUNDS, NOISY, VERDICTS, WORSE, Comparison, compare
from bench.figures import Run
from bench.probes import QUIET_SHARE
from bench.report import percent

_COLOURS = {WORSE: "bold red", BETTER: "green", NOISY: "yellow", FEW: "yellow"}


class Pair(NamedTuple):
    """Both sides of a part in one round."""

    base: Run
    ours: Run


class Row(NamedTuple):
    """A figure of a part: its values by round, and what they say."""

    label: str
    unit: str
    base: list[float]
    ours: list[float]
    others: float  # median share of the cores that others used
    compared: Comparison


def rows(pairs: Mapping[Part, Sequence[Pair]], *, threshold: float, confidence: float) -> dict[str, Row]:
    """By "part/figure", in the order of the parts. A figure counts in the rounds in which both sides have it."""
    found: dict[str, Row] = {}
    for part, rounds in pairs.items():
        figures = {name: figure for pair in rounds for name, figure in pair.base.figures.items()}
        others = statistics.median(run.others for pair in rounds for run in pair) if rounds else 0.0
        for name, figure in figures.items():
            both = [
                (value, other)
                for pair in rounds
                if name in pair.base.figures and name in pair.ours.figures
                for value, other in zip(
                    pair.base.figures[name].rounds, pair.ours.figures[name].rounds, strict=True
                )
            ]
            if not both:
                continue
            base, ours = ([pair[side] for pair in both] for side in (0, 1))
            compared = compare(base, ours, higher=figure.higher, threshold=threshold, confidence=confidence)
            label = f"{part.bench}: {figure.label}" if part.bench else figure.label
            found[f"{part}/{name}"] = Row(label, figure.unit, base, ours, others, compared)
    return found


def print_rows(found: Mapping[str, Row], title: str, console: Console) -> None:
    """One table, how many figures have which verdict, and whether the machine was busy."""
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    for column in ("base", "ours", "unit", "worse by", "interval"):
        table.add_column(column, justify="left" if column == "unit" else "right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("others", justify="right", no_wrap=True)
    for row in found.values():
        compared = row.compared
        interval = " .. ".join(map(change_text, compared.interval or ()))
        said = verdict_text(compared)
        colour = _COLOURS.get(compared.verdict)
        table.add_row(
            row.label,
            f"{compared.base:,.4g}" if compared.base < 1e4 else f"{compared.base:,.0f}",
            f"{compared.ours:,.4g}" if compared.ours < 1e4 else f"{compared.ours:,.0f}",
            row.unit,
            change_text(compared.change),
            interval,
            f"[{colour}]{said}[/]" if colour else said,
            percent(row.others),
        )
    console.print(table)
    counts = Counter(row.compared.verdict for row in found.values())
    console.print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]))
    busy = sum(row.others > 1 - QUIET_SHARE for row in found.values())
    if busy:
        console.print(
            f'Others used more than {1 - QUIET_SHARE:.0%} of the cores (column "others") while {busy} of {len(found)} '
            "figures were measured. That makes intervals wider, and the verdicts allow for it.",
            style="bold yellow",
        )


def change_text(share: float) -> str:
    """ "+3.1%"; no decimals from 100 % on."""
    return f"{share:+.1%}" if share < 1 else f"{share:+.0%}"


def verdict_text(compared: Comparison) -> str:
    """ "too noisy: 12 more", of rounds."""
    if not compared.rounds_more:
        return compared.verdict
    if compared.rounds_more >= MOST_ROUNDS:
        return f"{compared.verdict}: {MOST_ROUNDS} more, or never"
    return f"{compared.verdict}: {compared.rounds_more} more"


def document(found: Mapping[str, Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    """For the JSON file."""
    return {
        "machine": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
        },
        **settings,
        "figures": {
            name: row._asdict() | {"compared": row.compared._asdict()} for name, row in found.items()
        },
    }


def write_json(path: Path, found: Mapping[str, Row], settings: Mapping[str, Any]) -> None:
    """Everything that was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(found, settings), indent=1) + "\n")
