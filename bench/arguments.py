"""The command line that the benchmarks share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

OUT = Path(__file__).parent / "out"
WIDTH = 160  # of what goes into a file


class Given(NamedTuple):
    """What the command line says; `rounds` is 1 if `quick`."""

    rounds: int
    quick: bool
    wanted: list[str]
    settle: float
    json: Path | None
    limits: bool


def parse(
    prog: str, description: str | None, workloads: Sequence[str], arguments: Sequence[str], *, rounds: int
) -> Given:
    """`workloads` are letters; `rounds` is the default. Ends the program when the line is wrong."""
    parser = parser_of(prog, description)
    parser.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help=f"how many rounds (default: {rounds})"
    )
    parser.add_argument("--quick", action="store_true", help="one round with less of everything")
    parser.add_argument(
        "--only", default=",".join(workloads), metavar="a,b,...", help="some of the workloads"
    )
    parser.add_argument(
        "--no-limits",
        action="store_true",
        help="of the service: without what the machine can do, for comparisons of two runs",
    )
    add_common(parser)
    given = parser.parse_args(arguments)
    wanted = [name.strip() for name in given.only.split(",")]
    if unknown := [name for name in wanted if name not in workloads or len(name) != 1]:
        parser.error(f"no such workload: {', '.join(unknown)}; there are {', '.join(workloads)}")
    return Given(
        1 if given.quick else given.rounds, given.quick, wanted, given.settle, given.json, not given.no_limits
    )


def parser_of(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Of a command line whose help keeps the lines of `description`."""
    return argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options of every run: how long to wait for a quiet machine, and where the figures go."""
    parser.add_argument(
        "--settle",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long to wait for a quiet machine before each workload (default: 5)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where the figures go (default: bench/out/)"
    )


def console() -> Console:
    """For people, or for a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
