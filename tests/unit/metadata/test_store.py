"""One suite for every metadata store: what MetadataStore promises."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from magnetar.metadata import Check, Create, Delete, MetadataStore, Put, Versioned
from magnetar.metadata.embedded import EmbeddedMetadataStore
from magnetar.metadata.local import LocalMetadataStore
from magnetar.proto.errors import (
    AlreadyClosed,
    AlreadyExists,
    InvalidArgument,
    NodeNotEmpty,
    NotFoundInStore,
    StorageFailed,
    VersionConflict,
)
from support.memory_metadata import MemoryMetadataStore, ModelKeyValue
from support.zookeeper import Ensemble, open_store

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # ZooKeeper is a real process

Reopen = Callable[[], LocalMetadataStore]


@pytest.fixture(params=["memory", "embedded"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Reopen:
    """Opens a store of one process; called again, opens a successor on the same storage."""
    return _opener(request.param, tmp_path)


@pytest_asyncio.fixture
async def local_store(reopen: Reopen) -> AsyncIterator[LocalMetadataStore]:
    opened = reopen()
    yield opened
    await opened.close()


@pytest_asyncio.fixture(params=["memory", "embedded", pytest.param("zookeeper", marks=pytest.mark.real)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MetadataStore]:
    """Every store. On ZooKeeper a root of its own on the server that the tests share."""
    opened: MetadataStore
    if request.param == "zookeeper":
        ensemble: Ensemble = request.getfixturevalue("zookeeper")
        opened = await open_store(f"{ensemble.url}/{tmp_path.name}", make_root=True)
    else:
        opened = _opener(request.param, tmp_path)()
    yield opened
    await opened.close()


def _opener(kind: str, directory: Path) -> Reopen:
    if kind == "memory":
        disk = ModelKeyValue()
        return lambda: MemoryMetadataStore(disk)
    return lambda: EmbeddedMetadataStore(str(directory / "deep" / "metadata"))


async def turn() -> None:
    """Lets what was scheduled by call_soon run."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_create_get_put_delete(store: MetadataStore) -> None:
    assert await store.get("/a") is None
    assert await store.create("/a", b"one") == 0
    assert await store.get("/a") == Versioned(b"one", 0)
    assert await store.put("/a", b"two", version=0) == 1
    assert await store.get("/a") == (b"two", 1)
    await store.delete("/a", version=1)
    assert await store.get("/a") is None
    assert await store.create("/a", b"again") == 0


async def test_conflicts(store: MetadataStore) -> None:
    await store.create("/a", b"")
    with pytest.raises(AlreadyExists):
        await store.create("/a", b"")
    with pytest.raises(VersionConflict, match="version 0, not 7"):
        await store.put("/a", b"x", version=7)
    with pytest.raises(VersionConflict):
        await store.delete("/a", version=1)
    with pytest.raises(NotFoundInStore):
        await store.put("/b", b"x", version=0)
    with pytest.raises(NotFoundInStore):
        await store.delete("/b")
    assert await store.get("/a") == (b"", 0)


async def test_children_are_direct_sorted_and_implied(store: MetadataStore) -> None:
    for path in ("/t/b/x", "/t/b/y", "/t/b-2", "/t/b.3/q", "/t/a", "/tt", "/t/b0", "/t/ü"):
        await store.create(path, b"")
    assert await store.children("/t") == ["a", "b", "b-2", "b.3", "b0", "ü"]
    assert await store.children("/t/b") == ["x", "y"]
    names = ["a", "b", "b-2", "b.3", "b0", "ü"]
    for at, name in enumerate(names):
        assert await store.children("/t", after=name) == names[at + 1 :]
        assert await store.children("/t", after=name, limit=2) == names[at + 1 : at + 3]
    assert await store.children("/t", after="b-") == ["b-2", "b.3", "b0", "ü"], "a name that is not there"
    assert await store.children("/t", limit=1) == ["a"]
    assert await store.children("/") == ["t", "tt"]
    assert await store.children("/t/a") == []
    assert await store.get("/t") is None, "an implied parent has no value"


async def test_names_of_any_script(store: MetadataStore) -> None:
    names = sorted(
        ["100%", "a%2Fb", "%", "\x7f", "\x85", "\ue000", "\uffff", "\U00020000", "𝒳", "a b", "ü"],
        key=str.encode,
    )
    calls: list[str] = []
    watches = [store.watch(f"/t/{name}", calls.append) for name in names]
    for name in reversed(names):
        await store.create(f"/t/{name}/below", name.encode())
    assert await store.children("/t") == names
    await turn()
    assert sorted(set(calls), key=str.encode) == [f"/t/{name}" for name in names]
    for at, name in enumerate(names):
        assert await store.get(f"/t/{name}/below") == (name.encode(), 0)
        assert await store.children("/t", after=name, limit=1) == names[at + 1 : at + 2]
        assert await store.next_id(f"ids/{name}") == 0
    await store.create("/real", b"")
    await store.commit([Create(f"/real/{name}/below", b"") for name in names])
    await store.commit([Delete(f"/real/{name}/below") for name in names] + [Delete("/real")])
    for watch in watches:
        watch.close()


async def test_a_node_with_nodes_below_it_stays(store: MetadataStore) -> None:
    await store.create("/a", b"")
    await store.create("/a/b/c", b"")
    with pytest.raises(NodeNotEmpty):
        await store.delete("/a")
    await store.commit([Delete("/a/b/c"), Delete("/a")])
    assert await store.children("/") == []


async def test_commit_is_all_or_nothing(store: MetadataStore) -> None:
    await store.create("/a", b"1")
    await store.create("/b", b"1")
    with pytest.raises(VersionConflict) as failure:
        await store.commit([Put("/a", b"2", 0), Create("/c", b""), Put("/b", b"2", 5)])
    assert failure.value.details["index"] == 2
    assert (await store.get("/a"), await store.get("/c")) == ((b"1", 0), None)
    await store.commit([Put("/a", b"2", 0), Put("/a", b"3", 1), Create("/c", b""), Check("/b", 0)])
    assert await store.get("/a") == (b"3", 2)
    await store.commit([])


async def test_commit_checks(store: MetadataStore) -> None:
    await store.create("/a", b"")
    await store.commit([Check("/a", 0), Check("/b", None)])
    for check in (Check("/a", None), Check("/a", 1)):
        with pytest.raises(VersionConflict):
            await store.commit([check, Create("/never", b"")])
    with pytest.raises(NotFoundInStore):
        await store.commit([Check("/b", 0)])
    with pytest.raises(NodeNotEmpty):
        await store.commit([Create("/x", b""), Create("/x/y", b""), Delete("/x")])
    await store.commit([Create("/x", b""), Create("/x/y", b""), Delete("/x/y"), Delete("/x")])
    assert await store.children("/") == ["a"]


async def test_sequences_count_per_name(store: MetadataStore) -> None:
    assert [await store.next_id("ledgers") for _ in range(3)] == [0, 1, 2]
    assert await store.next_id("other") == 0
    assert [await store.next_id("ledgers", count) for count in (4, 1)] == [3, 7]
    assert [await store.next_id("ledgers", 0) for _ in range(2)] == [8, 8]  # draws none
    with pytest.raises(InvalidArgument):
        await store.next_id("")


async def test_sequences_never_repeat_after_a_crash(reopen: Reopen) -> None:
    store = reopen()
    taken = [await store.next_id("ledgers") for _ in range(3)]
    store._storage.close()  # no clean close: only what was synced is there
    successor = reopen()
    assert await successor.next_id("ledgers") > max(taken)
    await successor.close()


async def test_everything_survives_a_crash(reopen: Reopen) -> None:
    store = reopen()
    await store.create("/a/b", b"value")
    await store.put("/a/b", b"value 2", version=0)
    store._storage.close()
    successor = reopen()
    assert await successor.get("/a/b") == (b"value 2", 1)
    await successor.close()


async def test_sessions_end_with_close(store: MetadataStore) -> None:
    session = await store.open_session(4)
    other = await store.open_session(4)
    assert session.session_id != other.session_id
    await store.create("/bookies/a", b"", session=session)
    await store.create("/bookies/b", b"", session=other)
    await session.close()
    await session.close()
    assert await store.children("/bookies") == ["b"]
    with pytest.raises(AlreadyClosed):
        await store.create("/bookies/a", b"", session=session)


async def test_ephemerals_of_a_dead_process_are_purged_at_open(reopen: Reopen) -> None:
    store = reopen()
    session = await store.open_session(4)
    await store.create("/bookies/a", b"", session=session)
    await store.create("/bookies/kept", b"")
    first_id = session.session_id
    store._storage.close()
    successor = reopen()
    assert await successor.children("/bookies") == ["kept"]
    assert (await successor.open_session(4)).session_id > first_id
    await successor.close()


async def test_a_deleted_ephemeral_leaves_nothing_for_its_session_to_delete(
    store: MetadataStore,
) -> None:
    session = await store.open_session(4)
    await store.create("/a", b"", session=session)
    await store.delete("/a")
    await store.create("/a", b"for good")
    await session.close()
    assert await store.get("/a") == (b"for good", 0)


async def test_an_expired_session_tells_its_holder_and_loses_its_nodes() -> None:
    store = MemoryMetadataStore()
    session = await store.open_session(4)
    await store.create("/a", b"", session=session)
    told = []
    session.when_lost(lambda: told.append("lost"))
    store.expire(session.session_id)
    assert session.lost
    assert told == []
    await turn()
    assert told == ["lost"]
    assert await store.get("/a") is None
    session.when_lost(lambda: told.append("late"))
    await turn()
    assert told == ["lost", "late"]


async def test_a_watch_calls_back_once_for_several_changes_and_never_within_a_call(
    local_store: LocalMetadataStore,
) -> None:
    calls: list[str] = []
    local_store.watch("/t", calls.append)
    both = asyncio.gather(local_store.create("/t/a", b""), local_store.create("/t/b", b""))
    assert calls == []
    await both
    await turn()
    assert calls == ["/t"]


async def test_commits_of_one_turn_share_a_write_and_see_each_other(local_store: LocalMetadataStore) -> None:
    store = local_store
    writes: list[int] = []
    write = store._storage.write

    async def counted(changes: Any) -> None:
        writes.append(len(changes))
        await write(changes)

    store._storage.write = counted  # type: ignore[method-assign]
    found = await asyncio.gather(
        store.create("/a", b"0"),
        store.put("/a", b"1", version=0),
        store.create("/a", b"again"),
        store.create("/a/b", b""),
        store.delete("/a"),
        store.next_id("s"),
        store.next_id("s", 5),
        store.next_id("s"),
        store.get("/a"),
        return_exceptions=True,
    )
    assert found[:2] == [0, 1]
    assert isinstance(found[2], AlreadyExists)
    assert found[3] == 0
    assert isinstance(found[4], NodeNotEmpty)
    assert found[5:8] == [0, 1, 6]
    assert found[8] is None, "what is not durable yet is not shown"
    assert len(writes) == 1
    assert await store.get("/a") == (b"1", 1)
    assert await store.next_id("s", 0) == 7


async def test_a_node_is_not_deleted_while_one_below_it_is_made_and_is_with_it(
    local_store: LocalMetadataStore,
) -> None:
    store = local_store
    await store.create("/a", b"")
    made, refused, both = await asyncio.gather(
        store.create("/a/b/c", b""),
        store.delete("/a"),
        store.commit([Delete("/a/b/c"), Delete("/a")]),
        return_exceptions=True,
    )
    assert (made, type(refused), both) == (0, NodeNotEmpty, None)
    assert await store.children("/") == []


async def test_what_is_refused_for_a_change_under_way_is_refused_when_readers_see_it(
    local_store: LocalMetadataStore,
) -> None:
    async def second() -> Any:
        with pytest.raises(AlreadyExists):
            await local_store.create("/a", b"2")
        return await local_store.get("/a")

    _, seen = await asyncio.gather(local_store.create("/a", b"1"), second())
    assert seen == (b"1", 0)


async def test_a_commit_whose_caller_is_cancelled_does_not_cancel_the_others(
    local_store: LocalMetadataStore,
) -> None:
    first = asyncio.ensure_future(local_store.create("/a", b""))
    second = asyncio.ensure_future(local_store.create("/b", b""))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 0
    assert await local_store.children("/") == ["a", "b"]


async def test_a_group_that_cannot_be_written_fails_for_all() -> None:
    disk = ModelKeyValue()
    store = MemoryMetadataStore(disk)
    disk.fail_writes("no luck")
    found = await asyncio.gather(store.create("/a", b""), store.create("/a", b""), return_exceptions=True)
    assert [type(one) for one in found] == [StorageFailed, StorageFailed]
    with pytest.raises(StorageFailed):
        await store.next_id("s")


async def test_a_page_shows_what_was_made_and_deleted_since_the_one_before(store: MetadataStore) -> None:
    names = [f"{number:02d}" for number in range(30)]
    for name in names:
        await store.create(f"/t/{name}", b"")
    for at in (4, 9, 14):
        assert await store.children("/t", after=names[at], limit=5) == names[at + 1 : at + 6]
    await store.create("/t/20a", b"")
    await store.delete("/t/21")
    assert await store.children("/t", after="19", limit=4) == ["20", "20a", "22", "23"]
    await store.create("/t/25/x", b"")
    await store.delete("/t/26")
    await store.create("/t/26", b"")
    assert await store.children("/t", after="23", limit=5) == ["24", "25", "26", "27", "28"]
    assert await store.children("/t", after="28", limit=5) == ["29"]
    assert await store.children("/t", after="29", limit=5) == []
    assert await store.children("/nobody", after="a", limit=5) == []


async def test_a_watch_reports_the_node_its_children_and_their_values(store: MetadataStore) -> None:
    calls: list[str] = []
    watch = store.watch("/t", calls.append)

    async def called() -> bool:
        await turn()
        assert set(calls) <= {"/t"}
        found = bool(calls)
        calls.clear()
        return found

    await store.create("/t/a", b"")
    assert await called(), "the node was not there, and its parent neither"
    await store.put("/t/a", b"1", version=0)
    assert await called()
    await store.create("/t", b"")
    assert await called()
    await store.create("/other", b"")
    await store.create("/t/a/deep", b"")  # /t/a exists: the children of /t are the same
    await store.put("/t/a/deep", b"1", version=0)
    assert not await called()
    await store.create("/t/implied/deep", b"")
    assert await called(), "a new implied child"
    await store.delete("/t/implied/deep")
    assert await called()
    await store.delete("/t/a/deep")
    watch.close()
    watch.close()
    await store.delete("/t/a")
    assert not await called()


async def test_no_watch_call_after_close(store: MetadataStore) -> None:
    told: list[str] = []
    watch = store.watch("/a", told.append)
    await store.create("/a", b"")
    watch.close()
    told.clear()  # what was called before
    await store.put("/a", b"1", version=0)
    await turn()
    assert told == []


async def test_a_watch_may_use_the_store(store: MetadataStore) -> None:
    seen: list[list[str]] = []
    tasks: list[asyncio.Task[None]] = []

    async def reread() -> None:
        seen.append(await store.children("/t"))
        if len(seen) == 1:
            await store.create("/t/b", b"")

    store.watch("/t", lambda _: tasks.append(asyncio.ensure_future(reread())))
    await store.create("/t/a", b"")
    while len(seen) < 2 or seen[-1] != ["a", "b"]:
        await turn()
    await asyncio.gather(*tasks)
    assert seen[0] == ["a"]


@pytest.mark.parametrize(
    "path", ["", "a", "/a/", "//a", "/a//b", "/a/../b", "/./a", "/a\x00b", "/a\ud800b", "/" + "x" * 5000]
)
async def test_bad_paths(store: MetadataStore, path: str) -> None:
    with pytest.raises(InvalidArgument, match="not a metadata path"):
        await store.get(path)
    with pytest.raises(InvalidArgument):
        await store.create(path, b"")
    with pytest.raises(InvalidArgument):
        store.watch(path, lambda _: None)


async def test_bad_values(store: MetadataStore) -> None:
    with pytest.raises(InvalidArgument, match="at most 1000000"):
        await store.create("/a", bytes(1_000_001))
    with pytest.raises(InvalidArgument, match="root"):
        await store.create("/", b"")


async def test_a_closed_store_says_so(store: MetadataStore) -> None:
    await store.close()
    await store.close()
    with pytest.raises(AlreadyClosed):
        await store.get("/a")
    with pytest.raises(AlreadyClosed):
        await store.commit([Create("/a", b"")])
