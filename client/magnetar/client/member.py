"""Member: what a client makes on a topic and closes with itself. The facades Producer, Consumer and Reader are members."""

from __future__ import annotations

from typing import Protocol, Self


class Attached(Protocol):
    """What a member hands over to."""

    async def open(self) -> None:
        """Attaches for the first time."""

    async def close(self) -> None:
        """See Member."""

    def abort(self) -> None:
        """See Member."""


class Member:
    """Left by `close`, or by the end of `async with`: in order, or at once after an error or a cancellation."""

    def __init__(self, topic: str, attached: Attached) -> None:
        self._topic = topic
        self._attached = attached

    @property
    def topic(self) -> str:
        """Full name of the topic."""
        return self._topic

    async def _open(self) -> None:
        await self._attached.open()

    async def close(self) -> None:
        """Leaves the topic; who waits for messages is woken.

        A producer flushes before and raises as `flush`, closed all the same.
        """
        await self._attached.close()

    def abort(self) -> None:
        """Leaves the topic at once, waiting for nothing.

        Acknowledgements that are queued are sent; messages that are not confirmed fail with AlreadyClosed, though they may
        have been stored.
        """
        self._attached.abort()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._topic}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
        else:
            self.abort()
