"""A timeout for every call of the metadata store."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from magnetar.proto.errors import RequestTimeout

T = TypeVar("T")


async def metadata_in_time(work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
    """The result, or RequestTimeout, which names the setting. Whether it was done then is not known."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await work
    except TimeoutError:
        if not deadline.expired():
            raise  # the store's own
        raise RequestTimeout(
            f"the metadata store did not answer within metadata_timeout_s={timeout_s:g} s ({what}); whether it did it is "
            "not known"
        ) from None
