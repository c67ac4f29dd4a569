"""A watch of a store whose changes are reported in this process's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LoopWatch:
    """Watch of MetadataStore. `forget` takes it out of its store's list."""

    def __init__(
        self, path: str, callback: Callable[[str], None], forget: Callable[[LoopWatch], None]
    ) -> None:
        self.path = path
        self._callback = callback
        self._forget = forget
        self._scheduled = False
        self._closed = False

    def changed(self) -> None:
        """Calls back in the next turn of the loop, once for all changes until then."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._call)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._forget(self)

    def _call(self) -> None:
        self._scheduled = False
        if not self._closed:
            self._callback(self.path)
