"""Calls: again after a pause, shared by several who wait, several of which one is enough, or that each topic needs.

Who owns the time of a request:

ConnectionPool.request, Attachment.call   `until_answered`: operation_timeout, pauses of `backoff`
Attachment                                pauses of `backoff` for as long as it is open
Lookups                                   the time of the call that asks; pauses against a rush (`lookups`)
BrokerConnections                         connect_timeout; a broker that failed is let alone (`core.reachability`)
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from magnetar.proto.errors import ConnectionLost, MagnetarError, RequestTimeout, VersionConflict
from magnetar.runtime.tasks import awaited

from ..options import ClientOptions

# Topics that are opened or closed side by side.
TOPICS_AT_ONCE = 50
# Topics that an error names; its details have all.
MAX_NAMED = 10

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

Call = Callable[[], Coroutine[Any, Any, T]]


class _Shared(Generic[T]):
    """One call, and how many wait for it."""

    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.waiting = 0


class SharedCalls(Generic[K, T]):
    """Calls under way, by key: whoever asks for the same one meanwhile waits for it. It is cancelled when nobody waits."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._calls: dict[K, _Shared[T]] = {}
        self._ending: dict[asyncio.Task[T], None] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def get(self, key: K, call: Call[T]) -> T:
        """The result of `call`, or of the one under way. Raises what it raises, ConnectionLost when it was stopped."""
        shared = self._calls.get(key)
        if shared is None:
            task = awaited(call(), f"{self._what} {key}")
            shared = self._calls[key] = _Shared(task)
            task.add_done_callback(lambda done: self._ended(key, done))
        shared.waiting += 1
        try:
            return await asyncio.shield(shared.task)
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if shared.task.cancelled() and own is not None and not own.cancelling():
                raise ConnectionLost(f"{self._what} was stopped; try again") from None
            raise
        finally:
            shared.waiting -= 1
            if not shared.waiting and not shared.task.done():
                self._stop(key, shared)

    def stop(self) -> None:
        """Whoever waits gets ConnectionLost; `wait_ended` waits until the calls have ended."""
        for key, shared in list(self._calls.items()):
            self._stop(key, shared)

    async def wait_ended(self) -> None:
        """Returns when everything that was stopped has ended."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _stop(self, key: K, shared: _Shared[T]) -> None:
        if self._calls.get(key) is shared:
            del self._calls[key]
        self._ending[shared.task] = None
        shared.task.cancel()

    def _ended(self, key: K, task: asyncio.Task[T]) -> None:
        self._ending.pop(task, None)
        shared = self._calls.get(key)
        if shared is not None and shared.task is task:
            del self._calls[key]
        if not task.cancelled():
            task.exception()  # those who waited may all have gone


async def first_success(
    calls: Sequence[Call[T]], head_start: float, *, discard: Callable[[T], object] = lambda _: None
) -> T:
    """The result of the first call that succeeds.

    Each is made when one before it failed, or `head_start` seconds after the last one was made (as "happy eyeballs",
    RFC 8305, has it). The others are then cancelled; `discard` gets what they had made already. Raises the error of the only
    call, or of all.
    """
    left = deque(calls)
    running: dict[asyncio.Task[T], None] = {}
    errors: list[MagnetarError] = []
    try:
        while left or running:
            if left:
                running[awaited(left.popleft()())] = None
            await asyncio.wait(
                running, timeout=head_start if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in [task for task in running if task.done()]:
                del running[task]
                try:
                    return task.result()
                except MagnetarError as error:
                    errors.append(error)
        raise _all_of(errors)
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for task in running:
            if not task.cancelled() and task.exception() is None:
                discard(task.result())


def _all_of(errors: list[MagnetarError]) -> MagnetarError:
    """One error for several; what is not retryable counts most."""
    final = next((error for error in errors if not error.retryable), None)
    if final is not None or len(errors) == 1:
        return final or errors[0]
    return ConnectionLost("; ".join(dict.fromkeys(error.message for error in errors)))


def backoff(first: float, longest: float, rng: random.Random) -> Iterator[float]:
    """Pauses in seconds: up to twice `first`, then `first`, doubling up to `longest`; half more or less at random.

    So much chance, that ten thousand clients of a broker that fails do not come to the next one at the same moment.
    """
    yield 2 * first * rng.random()
    pause = first
    while True:
        yield pause * rng.uniform(0.5, 1.5)
        pause = min(pause * 2, longest)


async def until_answered(
    attempt: Callable[[], Awaitable[T]], options: ClientOptions, rng: random.Random, what: str
) -> T:
    """Repeats `attempt` after retryable errors, with pauses; RequestTimeout when operation_timeout is over.

    `what` says what failed then. VersionConflict is raised at once: the same compare-and-set can only fail again.
    """
    pauses = backoff(options.backoff_first, options.backoff_max, rng)
    last: MagnetarError | None = None
    try:
        async with asyncio.timeout(options.operation_timeout):
            while True:
                try:
                    return await attempt()
                except MagnetarError as error:
                    if not error.retryable or isinstance(error, VersionConflict):
                        raise
                    last = error
                await asyncio.sleep(next(pauses))
    except TimeoutError:
        reason = last.message if last is not None else "no answer"
        raise RequestTimeout(
            f"{what} within operation_timeout={options.operation_timeout:g} s: {reason}"
        ) from last


async def all_of(calls: Mapping[str, Awaitable[None]]) -> None:
    """Awaits a call for each topic to its end. Raises what the only one that failed did, or one error for all of them.

    It is of the kind of the first; its details have the errors by topic, as "failed".
    """
    ended = await asyncio.gather(*calls.values(), return_exceptions=True)
    errors = {topic: error for topic, error in zip(calls, ended, strict=True) if error is not None}
    for error in errors.values():
        if not isinstance(error, MagnetarError):
            raise error
    failed = [(topic, error) for topic, error in errors.items() if isinstance(error, MagnetarError)]
    if failed:
        first = failed[0][1]
        named = "; ".join(f"{topic}: {error.message}" for topic, error in failed[:MAX_NAMED])
        text = named if len(calls) == 1 else f"{len(failed)} of {len(calls)} topics failed: {named}"
        more = "; and so on" if len(failed) > MAX_NAMED else ""
        raise type(first)(text + more, **{**first.details, "failed": dict(failed)}) from first


async def side_by_side(calls: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
    """Does as `all_of` with calls of which TOPICS_AT_ONCE are under way at a time."""
    slots = asyncio.Semaphore(TOPICS_AT_ONCE)

    async def in_turn(call: Callable[[], Awaitable[None]]) -> None:
        async with slots:
            await call()

    await all_of({topic: in_turn(call) for topic, call in calls.items()})
