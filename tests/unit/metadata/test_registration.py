"""A process's node in the shared metadata: there as long as its session, made again with the next one."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from magnetar.metadata import Session, registration
from magnetar.metadata.registration import Registration
from magnetar.proto.errors import ConnectionLost, ServiceNotReady
from support.memory_metadata import MemoryMetadataStore

PATH = "/bookies/b1"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "POLL_S", 0.01)
    monkeypatch.setattr(registration, "_PREDECESSOR_TIMEOUTS", 0.1)


async def value_of(store: MemoryMetadataStore, path: str = PATH) -> bytes | None:
    node = await store.get(path)
    return None if node is None else node.value


async def until(store: MemoryMetadataStore, wanted: Callable[[bytes | None], bool]) -> None:
    async with asyncio.timeout(10):
        while not wanted(await value_of(store)):
            await asyncio.sleep(0.001)


async def test_a_registration_follows_its_value_and_goes_with_its_process() -> None:
    store = MemoryMetadataStore()
    values = [b"writable"]
    registered = Registration(store, PATH, lambda: values[-1], 1.0, name="bookie b1")
    await registered.start()
    assert await value_of(store) == b"writable"
    values.append(b"read-only")
    await until(store, lambda value: value == b"read-only")
    await registered.close()
    await registered.close()
    assert await value_of(store) is None


async def test_a_lost_session_is_followed_by_a_new_registration() -> None:
    store = MemoryMetadataStore()
    registered = Registration(store, PATH, lambda: b"here", 1.0, name="bookie b1")
    await registered.start()
    for session in list(store._sessions):
        store.expire(session)
    assert await value_of(store) is None
    await until(store, lambda value: value == b"here")
    await registered.close()


async def test_what_is_made_in_a_session_ends_with_it_and_who_needs_one_waits_for_the_next() -> None:
    store = MemoryMetadataStore()
    lost: list[bool] = []
    running: list[int] = []

    async def beside(session: Session) -> None:
        running.append(session.session_id)
        try:
            await asyncio.Event().wait()
        finally:
            running.remove(session.session_id)

    registered = Registration(
        store,
        PATH,
        lambda: b"here",
        1.0,
        name="bookie b1",
        on_lost=lambda: lost.append(registered.registered.is_set()),
        in_session=beside,
    )
    await registered.start()
    first = registered.session
    async with asyncio.timeout(10):
        while not running:
            await asyncio.sleep(0)
        store.expire(first.session_id)
        assert not registered.standing
        while not lost:
            await asyncio.sleep(0)
        await registered.registered.wait()
        second = registered.session
        while not running:
            await asyncio.sleep(0)
    assert (lost, second is first, running) == ([False], False, [second.session_id])
    await registered.close()
    assert (lost, running) == ([False], []), "who closes it knows"


async def test_it_waits_for_the_session_of_a_predecessor_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryMetadataStore()
    before = await store.open_session(1)
    await store.create(PATH, b"before", session=before)
    registered = Registration(store, PATH, lambda: b"after", 1.0, name="bookie b1")
    starting = asyncio.create_task(registered.start())
    await asyncio.sleep(0.03)
    assert not starting.done()
    await before.close()
    await starting
    assert await value_of(store) == b"after"
    monkeypatch.setattr(registration, "_START_PATIENCE_S", 0.0)
    second = Registration(store, PATH, lambda: b"second", 1.0, name="bookie b1")
    with pytest.raises(ServiceNotReady, match=r"another process.*under this name"):
        await second.start()
    assert await value_of(store) == b"after"
    await registered.close()


async def test_a_value_that_cannot_be_written_is_written_later_in_the_same_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the session was given up, and for others the bookie was gone."""
    store = MemoryMetadataStore()
    values = [b"writable"]
    registered = Registration(store, PATH, lambda: values[-1], 1.0, name="bookie b1")
    await registered.start()
    (session,) = store._sessions
    real = store.put
    failed: list[Any] = []

    async def put(*arguments: Any, **options: Any) -> int:
        if not failed:
            failed.append(arguments)
            raise ConnectionLost("the request is lost")
        return await real(*arguments, **options)

    monkeypatch.setattr(store, "put", put)
    values.append(b"read-only")
    await until(store, lambda value: value == b"read-only")
    assert failed
    assert list(store._sessions) == [session]
    await registered.close()


@pytest.mark.parametrize("turns", range(6))
async def test_it_ends_when_it_is_closed_at_the_moment_at_which_its_session_is_lost(turns: int) -> None:
    """Regression: it forgot that it was closed, and registered again for ever."""
    store = MemoryMetadataStore()
    registered = Registration(store, PATH, lambda: b"here", 1.0, name="bookie b1")
    await registered.start()
    for session in list(store._sessions):
        store.expire(session)
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await registered.close()
    assert await value_of(store) is None
