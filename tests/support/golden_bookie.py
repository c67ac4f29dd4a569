"""Makes tests/golden/bookie anew: only for a deliberate change of a format, which must be in FORMATS.md.

    PYTHONPATH=tests .venv/bin/python -m support.golden_bookie tests/golden/bookie

Two journal and two ledger directories, copied while the bookie ran: ledgers 1 to 3 with 20 entries each are flushed, ledger
3 is fenced, ledger 1 has the explicit LAC 19 and ledger 5 is unknown; in the journals alone are 10 more entries of ledgers 1
and 2, fences of 2 and 77, and LAC 29 of ledger 1.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.bookie_kit import KIB, add_all, entry, open_real
from support.running_copy import copy_running

__all__ = ["golden_settings"]


def golden_settings(root: Path) -> dict[str, Any]:
    """What the golden bookie was made with."""
    return {
        "journal_file_bytes": 16 * KIB,
        "entry_log_bytes": 2048,
        "journal_directories": (str(root / "journal"), str(root / "journal-2")),
        "ledger_directories": (str(root / "ledgers"), str(root / "ledgers-2")),
    }


async def _make(target: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "bookie"
        bookie = await open_real(
            str(root), bookie_id="golden-1", checkpoint_interval_s=3600.0, **golden_settings(root)
        )
        try:
            for ledger in (1, 2, 3):
                assert not any(await add_all(bookie, [entry(ledger, number) for number in range(20)]))
            await bookie.fence(3)
            await bookie.write_last_confirmed(1, 19)
            await bookie.fencing.mark_unknown([5])
            await bookie.checkpoint()
            for ledger in (1, 2):
                assert not any(await add_all(bookie, [entry(ledger, number) for number in range(20, 30)]))
            await bookie.fence(2)
            await bookie.fence(77)
            await bookie.write_last_confirmed(1, 29)
            copy_running(root, target, "LOCK", "LOG", "reserve")
        finally:
            await bookie.close()


if __name__ == "__main__":
    asyncio.run(_make(Path(sys.argv[1])))
