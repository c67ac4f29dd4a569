"""Directories of bookies and placement."""

import asyncio
import random

import msgpack
import pytest

from magnetar.ledger import (
    BookieFacts,
    BookieHealth,
    Labels,
    LedgerSettings,
    RegisteredBookies,
    StaticBookies,
)
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.directory import encode_registration, parse_address
from magnetar.ledger.placement.chooser import BookieChooser
from magnetar.ledger.placement.policy import RANDOM, Placement
from magnetar.proto.errors import BookieUnavailable, InvalidSetting, NotEnoughBookies
from support.memory_metadata import MemoryMetadataStore


@pytest.mark.parametrize(
    ("text", "address"),
    [("h:1", ("h", 1)), ("127.0.0.1:3181", ("127.0.0.1", 3181)), ("[::1]:65535", ("::1", 65535))],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":3181", "host:0", "host:65536", "host:-1", "host:x"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(InvalidSetting, match="want host:port"):
        parse_address(text)


def test_static_bookies() -> None:
    directory = StaticBookies(["b:2", "a:1", "b:2"])
    assert directory.writable() == ("a:1", "b:2")
    assert directory.address("b:2") == ("b", 2)
    with pytest.raises(BookieUnavailable, match="not in the list"):
        directory.address("c:3")


async def test_registered_bookies_follow_the_store() -> None:
    store = MemoryMetadataStore()
    session = await store.open_session(4)
    await store.create("/bookies/b1", encode_registration("h1:3181"), session=session)
    directory = await RegisteredBookies.open(store)
    assert list(directory.writable()) == ["b1"]
    await store.create("/bookies/b0", encode_registration("h0:3181"))
    await store.create("/bookies/b2", encode_registration("h2:3181", read_only=True))
    for _ in range(5):
        await asyncio.sleep(0)
    assert list(directory.writable()) == ["b0", "b1"], "read-only ones take no new entries"
    assert directory.address("b2") == ("h2", 3181), "and are read all the same"
    await session.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert list(directory.writable()) == ["b0"]
    assert directory.address("b1") == ("h1", 3181), "the last address known"
    with pytest.raises(BookieUnavailable):
        directory.address("b9")
    await directory.close()
    await directory.close()


async def test_who_takes_no_entries_is_named_with_the_reason() -> None:
    store = MemoryMetadataStore()
    await store.create("/bookies/a", encode_registration("h:1"))
    full = encode_registration("h:2", read_only=True, read_only_reason="no space in /data")
    await store.create("/bookies/b", full)
    await store.create("/bookies/c", encode_registration("h:3", journal_stalled_s=7.0))
    await store.create("/bookies/d", encode_registration("h:4"))
    directory = await RegisteredBookies.open(store)
    await store.delete("/bookies/d")
    for _ in range(5):
        await asyncio.sleep(0)
    assert directory.refusals() == {
        "b": "read-only: no space in /data",
        "c": "its journal hangs, for 7 s",
        "d": "it is not registered any more",
    }
    await directory.close()
    bookies = StaticBookies(dict.fromkeys("abc", ("h", 1)))
    bookies.answered("b", BookieFacts(read_only=True, read_only_reason="no space in /data"))
    bookies.lost("c")
    assert bookies.refusals() == {"b": "read-only: no space in /data", "c": "it failed, or does not answer"}
    health = BookieHealth(LedgerSettings(), bookies)
    chooser = BookieChooser(bookies, Placement(RANDOM), health, random.Random(1), lambda bookie: None)
    with pytest.raises(NotEnoughBookies, match=r"1 are known \(a\)") as refused:
        chooser.ensemble(Striping(3, 2, 2), 0)
    assert refused.value.message.endswith(
        "; bookie b takes no entries: read-only: no space in /data; bookie c takes no entries: it failed, or does not answer"
    )


async def test_a_damaged_registration_harms_nobody_else() -> None:
    store = MemoryMetadataStore()
    await store.create("/bookies/a", b"\xc1")
    await store.create("/bookies/b", encode_registration("nonsense"))
    await store.create("/bookies/c", encode_registration("h:1"))
    directory = await RegisteredBookies.open(store)
    assert list(directory.writable()) == ["c"]
    await directory.close()


async def test_a_registration_tells_labels_and_free_space() -> None:
    store = MemoryMetadataStore()
    await store.create("/bookies/a", encode_registration("h:1", rack="r", zone="z", free_bytes=1 << 40))
    await store.create("/bookies/b", msgpack.packb({"address": "h:2"}))  # of an earlier release
    await store.create("/bookies/c", msgpack.packb({"address": "h:3", "rack": 7, "free_bytes": -1, "new": 1}))
    directory = await RegisteredBookies.open(store)
    assert list(directory.writable()) == ["a", "b", "c"]
    assert directory.writable() is directory.writable()
    assert directory.labels("a") == Labels("r", "z")
    assert directory.free_bytes("a") == 1 << 40
    for name in ("b", "c", "nobody"):
        assert directory.labels(name) == Labels()
        assert directory.free_bytes(name) == 0
    before = directory.writable()
    version = await store.put("/bookies/a", encode_registration("h:1", zone="y", free_bytes=5), version=0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert directory.labels("a") == Labels("", "y")
    assert directory.free_bytes("a") == 5
    assert directory.writable() is before, "the same object as long as they are the same"
    await store.delete("/bookies/a", version=version)
    for _ in range(5):
        await asyncio.sleep(0)
    assert directory.labels("a").zone == "y", "replacements count those that are gone"
    directory.suspected("b")
    assert list(directory.writable()) == ["b", "c"], "its session tells whether it lives"
    await directory.close()
