"""The formats on disk are pinned: a data directory of an earlier day opens, keeps what it holds, and is written on.

`tests/golden/bookie` was made by `support.golden_bookie`, which says what is in it. That page and FORMATS.md change with it.
"""

import shutil
from pathlib import Path

import pytest

from magnetar.bookie.cookie import read_cookie
from magnetar.bookie.layout import DataLayout
from magnetar.bookie.mark import decode_mark
from magnetar.proto.errors import LedgerFenced, UnknownLedgerState
from magnetar.runtime.files import OsFiles
from support.bookie_kit import add, entry, open_real
from support.golden_bookie import golden_settings

pytestmark = pytest.mark.real


GOLDEN = Path(__file__).parents[2] / "golden" / "bookie"
FILES = OsFiles()


async def test_the_golden_directory_opens_and_is_written_on(tmp_path: Path) -> None:
    root = tmp_path / "bookie"
    shutil.copytree(GOLDEN, root)
    journals = ("journal", "journal-2")
    before = read_cookie(FILES, DataLayout.at(str(root)))
    assert before is not None
    assert before.bookie_id == "golden-1"
    assert set(decode_mark((root / "mark").read_bytes(), "mark")) == set(journals)
    for last in (29, 30):
        bookie = await open_real(str(root), **golden_settings(root))
        assert bookie.cookie.instance == before.instance
        assert bookie.replayed_records == (23 if last == 29 else 0)
        for ledger, end in ((1, last), (2, 29), (3, 19)):
            assert (await bookie.read(ledger, 0, 99))[0] == [entry(ledger, n) for n in range(end + 1)]
        assert await bookie.read_last_confirmed(1) == (29, last)
        for ledger in (2, 3, 77):
            assert await add(bookie, entry(ledger, 50)) == LedgerFenced.code
        with pytest.raises(UnknownLedgerState):
            await bookie.read(5, 0, 0)
        if last == 29:
            assert await add(bookie, entry(1, 30)) == 0
        await bookie.close()
    after = read_cookie(FILES, DataLayout.at(str(root)))
    assert after is not None
    assert after.journal_directories == journals
    for name in (*journals, *[row.name for row in after.ledger_directories]):
        assert (root / name / "cookie").exists()
