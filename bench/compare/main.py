"""`make bench-compare BASE=rev`: is the working tree slower than another revision, and in what?

python -m bench compare                              the working tree beside HEAD: what is not committed yet
python -m bench compare --base main                  beside main: a branch and what is not committed
python -m bench compare --base main --only a,d       some workloads of the service, (a) to (h) of `python -m bench`
python -m bench compare --only bookie,ledger:b       those of the bookie, and (b) of the ledger client
python -m bench compare --quick                      the same rounds with less of everything
python -m bench compare --rounds 12                  narrower intervals

Each side has an environment of its own, which is installed once. In every round each workload runs on both sides, one after
the other, in alternating order. The benchmark code of the working tree measures both. The verdict on a figure is "worse"
only when the whole interval of its change lies beyond the threshold (bench/compare/verdict.py).

Exit code: 0 when no figure is worse, 1 when one is, 2 when there is no comparison, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.arguments import OUT, add_common, console, parser_of
from bench.bookie.run import WORKLOADS as BOOKIE_WORKLOADS
from bench.compare.driver import Drivers, Part, Side
from bench.compare.errors import CompareFailed
from bench.compare.report import Pair, Row, print_rows, rows, write_json
from bench.compare.revisions import BENCH, Environments, Repository, differing_packages
from bench.compare.verdict import WORSE
from bench.ledger.run import WORKLOADS as LEDGER_WORKLOADS

# (e) of the bookie is measured with its (a).
PARTS = {"service": "abcdefghi", "bookie": BOOKIE_WORKLOADS.replace("e", ""), "ledger": LEDGER_WORKLOADS}


def main(arguments: Sequence[str]) -> int:
    """Compares; returns the exit code."""
    given = parse(arguments)
    screen = console()

    def say(text: str) -> None:
        screen.print(text)

    path = given.json or OUT / time.strftime("compare-%Y%m%d-%H%M%S.json")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with run_folder(Path(__file__).resolve().parents[2] / "build" / "compare") as folder:
            found, title = run(given, folder, path, say)
    except CompareFailed as error:
        print(f"bench compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        written = f"; the rounds that were complete are in {path}" if path.exists() else ""
        print(f"bench compare: interrupted{written}", file=sys.stderr)
        return 130
    print_rows(found, title, screen)
    say(f"all figures: {path}")
    worse = [row.label for row in found.values() if row.compared.verdict == WORSE]
    if worse:
        say(f"worse: {'; '.join(worse)}")
    return 1 if worse else 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Ends the program when the line is wrong."""
    parser = parser_of("python -m bench compare", __doc__)
    parser.add_argument("--base", default="HEAD", metavar="REVISION", help="compared with (default: HEAD)")
    parser.add_argument(
        "--only",
        type=parse_parts,
        default=parse_parts("service"),
        metavar="a,b,bookie,ledger:a,...",
        help="which workloads (default: all of the service)",
    )
    parser.add_argument(
        "--rounds", type=_positive, default=8, metavar="N", help="pairs of each workload (default: 8)"
    )
    parser.add_argument("--quick", action="store_true", help="less of everything in every round")
    parser.add_argument(
        "--threshold",
        type=_percent,
        default=0.05,
        metavar="PERCENT",
        help="how much slower is worse (default: 5)",
    )
    parser.add_argument(
        "--confidence",
        type=_percent,
        default=0.95,
        metavar="PERCENT",
        help="of the intervals (default: 95)",
    )
    parser.add_argument(
        "--bench",
        metavar="REVISION",
        help="whose benchmarks measure both sides (default: the working tree's)",
    )
    add_common(parser)
    return parser.parse_args(arguments)


def parse_parts(text: str) -> list[Part]:
    """ "a,d", "bookie", "ledger:b": workloads without a name before the colon are those of the service."""
    parts: list[Part] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, colon, letters = word.partition(":")
        if not colon and name not in PARTS:
            name, letters = "service", word
        known = PARTS.get(name, "")
        if not known or not set(letters) <= set(known):
            choices = "; ".join(f"{bench}: {', '.join(known)}" for bench, known in PARTS.items())
            raise argparse.ArgumentTypeError(f"there is no workload {word}; there are {choices}")
        parts += [Part("" if name == "service" else name, letter) for letter in letters or known]
    if not parts:
        raise argparse.ArgumentTypeError("names no workload")
    return list(dict.fromkeys(parts))


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("is at least 1")
    return value


def _percent(text: str) -> float:
    if not 0 < (value := float(text)) < 100:
        raise argparse.ArgumentTypeError("is a percentage between 0 and 100")
    return value / 100


@contextlib.contextmanager
def run_folder(folder: Path) -> Iterator[Path]:
    """A folder for this run, removed with everything in it. Raises CompareFailed when another comparison goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CompareFailed("another comparison is running; two would measure each other") from None
        for left in folder.glob("run-*"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        mine = folder / f"run-{time.time_ns()}"
        mine.mkdir()
        try:
            yield mine
        finally:
            shutil.rmtree(mine, ignore_errors=True)


def run(
    given: argparse.Namespace, folder: Path, path: Path, say: Callable[[str], None]
) -> tuple[dict[str, Row], str]:
    """Installs, measures, writes `path` after every round; returns the rows and their title."""
    repository = Repository(Path(__file__).resolve().parent)
    base, ours = repository.revision(given.base), repository.working_tree()
    measuring = repository.revision(given.bench) if given.bench else ours
    environments = Environments(folder.parent, repository)
    opened = []
    for revision in (base, ours):
        if not environments.is_ready(revision):
            say(f"installing {revision.label}, once")
        opened.append(environments.open(revision))
    environments.forget_old()
    repository.export(measuring, BENCH, folder)
    sides = (Side(base.label, opened[0].python), Side(ours.label, opened[1].python))
    drivers = Drivers(folder, quick=given.quick, settle_s=given.settle)
    for side in sides:
        drivers.check(side, given.only)
    differing = differing_packages(*opened)
    if opened[0].python == opened[1].python:
        say("Both sides have the same product: whatever differs is noise.")
    elif differing:
        say(
            f"The packages of the two sides differ, and that is measured as well: {', '.join(differing)}. "
            "If pyproject.toml does not ask for that, remove build/compare to install both anew."
        )
    title = f"{ours.label} beside {base.label}, {given.rounds} rounds, intervals of {given.confidence:.0%}"
    settings = {
        "base": base._asdict(),
        "ours": ours._asdict(),
        "bench": measuring._asdict(),
        "packages": opened[1].packages,
        "differing_packages": differing,
        "rounds": given.rounds,
        "quick": given.quick,
        "threshold": given.threshold,
        "confidence": given.confidence,
    }
    pairs: dict[Part, list[Pair]] = {part: [] for part in given.only}
    found: dict[str, Row] = {}
    for number in range(given.rounds):
        for place, part in enumerate(given.only):
            began = time.perf_counter()
            pairs[part].append(measure(drivers, sides, part, swapped=(number + place) % 2 == 1))
            say(f"round {number + 1} of {given.rounds}, ({part}): {time.perf_counter() - began:.0f} s")
        found = rows(pairs, threshold=given.threshold, confidence=given.confidence)
        write_json(path, found, settings)
    return found, title


def measure(drivers: Drivers, sides: tuple[Side, Side], part: Part, *, swapped: bool) -> Pair:
    """The base first, or ours."""
    if swapped:
        ours = drivers.run(sides[1], part)
        return Pair(drivers.run(sides[0], part), ours)
    return Pair(drivers.run(sides[0], part), drivers.run(sides[1], part))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
