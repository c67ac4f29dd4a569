"""The real pulsar-admin and pulsar-shell against a Magnetar of one process: `make test-pulsar-admin`.

Every command of `commands.txt` is typed as it was against Pulsar, and what it asked, was answered, printed and returned is
compared with `exchanges.jsonl`. What differs must stand in the table `known.KNOWN`. The last line counts; the exit code is 1
where something is unexplained, or where the table explains what does not differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bench.service_process import ServiceProcess

from pulsar_admin import golden
from pulsar_admin.distribution import Missing, distribution, standalone
from pulsar_admin.known import KNOWN, explained
from pulsar_admin.shell import Recorder

_PAUSE_S = (
    0.3  # of recording: Pulsar shows what was changed, and ends what it began, a moment after it answered
)


def record(pulsar: Path, raw: Path | None) -> int:
    """Writes the golden file, from a Pulsar standalone."""
    with standalone(pulsar) as (url, native):
        raws = asyncio.run(Recorder(pulsar, url, native, _PAUSE_S).run())
    _keep(raws, raw)
    golden.write(raws)
    empty = [
        raw["command"] for raw in raws if raw["command"][0] != "!" and not raw["http"] and not raw["seen"]
    ]
    sys.stdout.write(f"{len(raws)} lines are recorded; nothing was seen of {empty}\n")
    return 0


def test(pulsar: Path, raw: Path | None) -> int:
    """Compares Magnetar with it."""
    with tempfile.TemporaryDirectory() as folder, ServiceProcess(Path(folder, "data")) as service:
        native = service.url.replace("magnetar://", "pulsar://")
        url = f"http://{service.host}:{service.ports['http']}"
        raws = asyncio.run(Recorder(pulsar, url, native).run())
    _keep(raws, raw)
    return report(raws)


def _keep(raws: list[dict[str, Any]], raw: Path | None) -> None:
    if raw:
        raw.write_text("".join(json.dumps(one) + "\n" for one in raws))


def report(raws: list[dict[str, Any]]) -> int:
    """Says what differs; 0: nothing but what is known to."""
    used: Counter[str] = Counter()
    known = unexplained = same = 0
    for wanted, raw in zip(golden.rows(), raws, strict=True):
        command = wanted["command"]
        if command != raw["command"]:
            sys.exit(
                f"commands.txt has {raw['command']!r} where {command!r} was recorded: make record-pulsar-admin"
            )
        if command.startswith("!"):
            continue
        rest = []
        differ = golden.compared(wanted, raw)
        for one in differ:
            if row := explained(command, one):
                used[row.what] += 1
            else:
                rest.append(one)
        if rest:
            unexplained += 1
            sys.stdout.write(f"{command}\n" + "".join(f"    {one[:600]}\n" for one in rest[:20]))
        known, same = known + bool(differ and not rest), same + (not differ)
    stale = [row for row in KNOWN if not used[row.what]]
    for row in stale:
        sys.stdout.write(f"known.py explains what does not differ: {row.what}\n")
    sys.stdout.write(
        f"pulsar-admin: {same + known + unexplained} commands, {same} the same, {known} differ as the table says, "
        f"{unexplained} unexplained\n"
    )
    return int(bool(unexplained or stale))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["record", "test", "report"])
    parser.add_argument("folder", type=Path, help="where Pulsar's distribution is, or comes to be")
    parser.add_argument("--raw", type=Path, help="a file for all that was seen, or of that to report about")
    given = parser.parse_args()
    if given.what == "report":
        return report([json.loads(line) for line in given.raw.read_text().splitlines()])
    try:
        pulsar = distribution(given.folder)
    except Missing as error:
        sys.stdout.write(f"make {given.what}-pulsar-admin: skipped: {error}\n")
        return 0
    return record(pulsar, given.raw) if given.what == "record" else test(pulsar, given.raw)


if __name__ == "__main__":
    sys.exit(main())
