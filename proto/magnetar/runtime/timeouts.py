"""A limit in time whose end is an error that says what was waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from magnetar.proto.errors import MagnetarError


class TimeLimit:
    """`async with TimeLimit(seconds, error)`: as `asyncio.timeout`, and raises what `error()` makes when it is over.

    Errors of the body pass unchanged. Do not tell by `except TimeoutError` whether a limit of asyncio's is over where the
    body asks a service: RequestTimeout is a TimeoutError, too.
    """

    def __init__(self, seconds: float | None, error: Callable[[], MagnetarError]) -> None:
        self._limit = asyncio.timeout(seconds)
        self._error = error

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:  # raised in place of the cancellation by which the body ended
            raise self._error() from None
