"""Data directories of earlier releases open, keep what they hold, and are written on.

`tests/golden/bookie-format-1` was left behind by kill -9: ledgers 1 to 3 with 20 entries each flushed, ledger 3 fenced and
LAC 19 of ledger 1 before the checkpoint; 10 more of ledgers 1 and 2, fences of 2 and 77 and LAC 29 of ledger 1 in journals
alone. `bookie-format-2` is the same work on two journal and two ledger directories, with ledger 5 marked unknown.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from magnetar.bookie.cookie import read_cookie
from magnetar.bookie.layout import DataLayout
from magnetar.bookie.mark import decode_mark
from magnetar.proto.errors import LedgerFenced, UnknownLedgerState
from magnetar.runtime.files import OsFiles
from support.bookie_kit import KIB, add, entry, open_real

GOLDEN = Path(__file__).parents[2] / "golden"
FILES = OsFiles()


@pytest.mark.parametrize("version", [1, 2])
async def test_a_directory_of_an_earlier_format_opens_and_is_written_on(tmp_path: Path, version: int) -> None:
    root = tmp_path / "bookie"
    shutil.copytree(GOLDEN / f"bookie-format-{version}", root)
    changes: dict[str, Any] = {"journal_file_bytes": 16 * KIB, "entry_log_bytes": 2048}
    journals: tuple[str, ...] = ("journal",)
    if version > 1:
        journals = ("journal", "journal-2")
        changes["journal_directories"] = tuple(str(root / name) for name in journals)
        changes["ledger_directories"] = (str(root / "ledgers"), str(root / "ledgers-2"))
    layout = DataLayout.at(str(root))
    before = read_cookie(FILES, layout)
    assert before is not None
    assert (before.format_version, before.bookie_id) == (version, "golden-1")
    assert set(decode_mark((root / "mark").read_bytes(), "mark")) == set(journals)
    for last in (29, 30):
        bookie = await open_real(str(root), **changes)
        assert bookie.cookie.format_version == 2
        assert bookie.cookie.instance == before.instance
        assert bookie.replayed_records == (23 if last == 29 else 0)
        for ledger, end in ((1, last), (2, 29), (3, 19)):
            assert (await bookie.read(ledger, 0, 99))[0] == [entry(ledger, n) for n in range(end + 1)]
        assert await bookie.read_last_confirmed(1) == (29, last)
        for ledger in (2, 3, 77):
            assert await add(bookie, entry(ledger, 50)) == LedgerFenced.code
        if version > 1:
            with pytest.raises(UnknownLedgerState):
                await bookie.read(5, 0, 0)
        if last == 29:
            assert await add(bookie, entry(1, 30)) == 0
        await bookie.close()
    after = read_cookie(FILES, layout)
    assert after is not None
    assert after.journal_directories == journals
    for name in (*journals, *[row.name for row in after.ledger_directories]):
        assert (root / name / "cookie").exists()
