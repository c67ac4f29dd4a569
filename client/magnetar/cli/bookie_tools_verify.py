"""`magnetar bookie verify` and `magnetar bookie index rebuild`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from magnetar.bookie.offline import StoppedBookie, Verification
from magnetar.bookie.offline import verify as verify_bookie

from .bookie_tools_open import Meter, number, print_table, with_bookie
from .session import EXIT_FAILED, print_json

# In the table; --json has all that were kept.
_FINDINGS_SHOWN = 50


def verify(data: str | None, config: str | None, assignments: Sequence[str] | None, *, as_json: bool) -> None:
    """Exit code 0: sound, 1: damage."""

    def work(bookie: StoppedBookie) -> int:
        with Meter(quiet=as_json) as meter:
            result = verify_bookie(bookie, meter)
        if as_json:
            print_json(
                {
                    "sound": result.sound,
                    "damage_found": result.damage_found,
                    "checks": [check._asdict() for check in result.checks],
                    "findings": [finding._asdict() for finding in result.findings],
                }
            )
        else:
            _print(bookie, result)
        return 0 if result.sound else EXIT_FAILED

    with_bookie(data, config, assignments, work)


def _print(bookie: StoppedBookie, result: Verification) -> None:
    root = bookie.layout.root
    print_table(
        "",
        ("part", "file", "records", "bytes", "verdict", ""),
        [
            (
                check.part,
                _short(root, check.path),
                number(check.records),
                number(check.bytes) if check.bytes else "",
                check.verdict,
                check.note,
            )
            for check in result.checks
        ],
        right=(2, 3),
    )
    if result.findings:
        shown = result.findings[:_FINDINGS_SHOWN]
        print_table(
            "damage",
            ("part", "file", "byte", "entry", ""),
            [
                (
                    finding.part,
                    _short(root, finding.path),
                    "" if finding.position < 0 else str(finding.position),
                    _entry(finding.ledger_id, finding.entry_id),
                    finding.text,
                )
                for finding in shown
            ],
            right=(2,),
        )
        if result.damage_found > len(shown):
            print(f"and {result.damage_found - len(shown):,} more; --json lists the first 10,000")
    print(
        "sound"
        if result.sound
        else f"NOT SOUND: {result.damage_found:,} findings"
        if result.damage_found
        else "NOT SOUND: a part could not be checked"
    )


def _short(root: str, path: str) -> str:
    inside = os.path.relpath(path, root) if path else ""
    return path if inside.startswith("..") else inside


def _entry(ledger_id: int, entry_id: int) -> str:
    if ledger_id < 0:
        return ""
    return f"{ledger_id}:{entry_id}" if entry_id >= 0 else f"{ledger_id}"
