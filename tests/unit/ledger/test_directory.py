"""Directories of bookies and placement."""

import asyncio

import pytest

from magnetar.ledger import RegisteredBookies, StaticBookies
from magnetar.ledger.directory import encode_registration, parse_address
from magnetar.metadata.memory import MemoryMetadataStore
from magnetar.proto.errors import BookieUnavailable, InvalidSetting


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


async def test_a_damaged_registration_harms_nobody_else() -> None:
    store = MemoryMetadataStore()
    await store.create("/bookies/a", b"\xc1")
    await store.create("/bookies/b", encode_registration("nonsense"))
    await store.create("/bookies/c", encode_registration("h:1"))
    directory = await RegisteredBookies.open(store)
    assert list(directory.writable()) == ["c"]
    await directory.close()
