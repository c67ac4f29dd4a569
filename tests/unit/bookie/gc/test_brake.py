"""Rule 37: a metadata store that lost something costs a small share of the ledgers, or none."""

import logging
from pathlib import Path

import pytest

from magnetar.proto.errors import InvalidSetting
from support.bookie_kit import small_settings
from support.gc_kit import Collected

LEDGERS = list(range(1, 61))


async def filled(path: Path) -> Collected:
    gc = Collected(path)
    await gc.open()
    await gc.write(LEDGERS, range(2), size=10)
    return gc


async def test_rule_37_a_store_that_gives_a_local_id_again_deletes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gc = await filled(tmp_path)
    assert gc.bookie is not None
    assert gc.existing is not None
    gc.existing.ledgers.clear()
    gc.existing.next_id = 60
    collected = await gc.bookie.collector.collect()
    assert collected.skipped
    assert collected.deleted_ledgers == 0
    assert "ids below 61 were used" in caplog.text
    gc.existing.next_id = 61
    assert (await gc.bookie.collector.collect()).deleted_ledgers == 10
    await gc.close()


async def test_rule_37_a_round_deletes_a_share_of_all_ledgers_at_most(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gc = await filled(tmp_path)
    assert gc.existing is not None
    for ledger_id in LEDGERS[:40]:
        del gc.existing.ledgers[ledger_id]
    bookie = await gc.reopen(gc_max_deleted_ratio=0.3)
    with caplog.at_level(logging.WARNING):
        deleted = [(await bookie.collector.collect()).deleted_ledgers for _ in range(5)]
    assert deleted == [18, 12, 10, 0, 0]
    assert "does not list 40 of the 60 ledgers" in caplog.text
    assert "gc_max_deleted_ratio=0.3" in caplog.text
    await gc.close()


@pytest.mark.parametrize("ratio", [-0.1, 1.5])
def test_a_ratio_that_is_none_is_refused(tmp_path: Path, ratio: float) -> None:
    with pytest.raises(InvalidSetting, match="gc_max_deleted_ratio"):
        small_settings(str(tmp_path), gc_max_deleted_ratio=ratio)
