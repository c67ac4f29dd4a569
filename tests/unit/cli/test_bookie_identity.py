"""A bookie and its metadata store belong together, or the service refuses to start (rules 8 and 9)."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from magnetar.bookie import Bookie, open_bookie
from magnetar.bookie.directories import replace_cookie
from magnetar.bookie.layout import DataLayout
from magnetar.cli.wiring.service import introduce_bookie, refuse_emptied
from magnetar.metadata.identity import cluster_instance, registered_cookie
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import DataDirectoryError, LedgerFenced, UnknownLedgerState, WrongBookie
from magnetar.runtime.files import OsFiles
from support.bookie_kit import add, entry, model_components, small_settings
from support.index_model import ModelStorage
from support.memory_metadata import MemoryMetadataStore


async def start(path: Path, metadata: MemoryMetadataStore, storage: ModelStorage, seed: int = 1) -> Bookie:
    """As the service does."""
    rng = random.Random(seed)
    components = replace(model_components(storage, seed=seed), cluster=await cluster_instance(metadata, rng))
    bookie = await open_bookie(small_settings(str(path), bookie_id="b1"), components)
    try:
        await introduce_bookie(bookie, metadata, bookie.cookie.cluster)
    except WrongBookie:
        await bookie.close()
        raise
    return bookie


async def test_emptied_metadata_beside_a_bookies_data_is_refused(tmp_path: Path) -> None:
    storage = ModelStorage()
    metadata = MemoryMetadataStore()
    for _ in range(2):
        bookie = await start(tmp_path, metadata, storage)
        assert bookie.cookie.cluster == await cluster_instance(metadata, random.Random(0))
        await bookie.close()
    with pytest.raises(DataDirectoryError, match="metadata store was emptied"):
        await start(tmp_path, MemoryMetadataStore(), storage, seed=2)
    await (await start(tmp_path, metadata, storage)).close()


async def test_the_refusal_of_an_emptied_bookie_names_the_directory_for_the_declaration(
    tmp_path: Path,
) -> None:
    """Regression: without --data the declaration was made in ./data, wherever that was, and changed nothing."""
    metadata = MemoryMetadataStore()
    bookie = await start(tmp_path / "bookie", metadata, ModelStorage())
    cluster = bookie.cookie.cluster
    await bookie.close()
    shutil.rmtree(tmp_path / "bookie")
    settings = small_settings(str(tmp_path / "bookie"), bookie_id="b1")
    with pytest.raises(WrongBookie, match=f"cookie --data {tmp_path} --accept-new-disk b1"):
        await refuse_emptied(OsFiles(), settings, metadata, cluster)


async def test_rule_09_a_known_bookie_with_emptied_disks_is_refused_until_it_is_replaced(
    tmp_path: Path,
) -> None:
    metadata = MemoryMetadataStore()
    bookie = await start(tmp_path / "b", metadata, ModelStorage())
    assert await add(bookie, entry(1, 0)) == 0
    await bookie.close()
    shutil.rmtree(tmp_path / "b")
    await StoredLedgers(metadata).new_ids(4)  # 0 to 3 are ledgers of the bookie that is lost
    with pytest.raises(WrongBookie, match="were its disks emptied"):
        await start(tmp_path / "b", metadata, ModelStorage(), seed=2)
    shutil.rmtree(tmp_path / "b")

    replace_cookie(OsFiles(), DataLayout.at(str(tmp_path / "b")), "b1", random.Random(3))
    storage = ModelStorage()
    for made in (4, 5):
        bookie = await start(tmp_path / "b", metadata, storage)
        assert not bookie.cookie.repairing
        registered = await registered_cookie(metadata, "b1")
        assert registered.identity.instance == bookie.cookie.instance
        for ledger in (1, 3):
            with pytest.raises(UnknownLedgerState):
                await bookie.read(ledger, 0, 0, fence=True)
            assert await add(bookie, entry(ledger, 9)) == LedgerFenced.code
        assert await StoredLedgers(metadata).new_ids() == made
        assert await add(bookie, entry(made, 0)) == 0
        await bookie.close()
