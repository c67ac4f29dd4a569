"""A bookie that its operator converted to read-only."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from magnetar.bookie.disk_space import clear_read_only, marker_path, read_only_reason, set_read_only
from magnetar.bookie.layout import DataLayout
from magnetar.bookie.status import bookie_info
from magnetar.proto.errors import BookieReadOnly
from magnetar.runtime.files import OsFiles
from support.bookie_kit import add, entry, open_real
from support.offline_kit import entries_of


def test_the_marker_is_durable_text_whatever_stands_in_it(tmp_path: Path) -> None:
    files, layout = OsFiles(), DataLayout.at(str(tmp_path))
    assert read_only_reason(files, layout) == ""
    set_read_only(files, layout, "two\nlines")
    assert read_only_reason(files, layout) == "two lines"
    set_read_only(files, layout, "")
    assert read_only_reason(files, layout)
    Path(marker_path(layout)).write_bytes(b"\xff" * 100_000)
    assert read_only_reason(files, layout)
    for _ in range(2):
        clear_read_only(files, layout)
        assert read_only_reason(files, layout) == ""


@pytest.mark.real
def test_rule_12_it_takes_no_adds_until_the_marker_is_gone(killed: Path) -> None:
    files, layout = OsFiles(), DataLayout.at(str(killed))

    async def main() -> None:
        set_read_only(files, layout, "moved to a new machine")
        bookie = await open_real(str(killed))
        try:
            assert await add(bookie, entry(1, 75)) == BookieReadOnly.code
            assert await add(bookie, entry(2, 30), recovery=True) == 0
            await bookie.fence(2)
            read, _ = await bookie.read(1, 0, 74)
            assert read == [entries_of(1)[number] for number in range(len(read))]
            info = bookie_info(bookie)
            assert info["read_only"] is True
            assert "moved to a new machine" in info["read_only_reason"]
        finally:
            await bookie.close()
        clear_read_only(files, layout)
        bookie = await open_real(str(killed))
        try:
            assert await add(bookie, entry(1, 75)) == 0
            assert bookie_info(bookie)["read_only"] is False
        finally:
            await bookie.close()

    asyncio.run(main())
