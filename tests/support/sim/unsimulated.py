"""What an event loop can do and the simulation does not: every use says so at once."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn


class UnsimulatedParts(asyncio.AbstractEventLoop):
    """Base of SimLoop. Nothing here can be replayed, so production code that needs it needs a seam."""

    def _refuse(self, name: str) -> NoReturn:
        raise NotImplementedError(f"the simulated loop has no {name}: put it behind a seam (ARCHITECTURE.md)")

    async def connect_read_pipe(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("connect_read_pipe")

    async def connect_write_pipe(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("connect_write_pipe")

    async def create_datagram_endpoint(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("create_datagram_endpoint")

    async def getaddrinfo(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("getaddrinfo")

    async def getnameinfo(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("getnameinfo")

    async def sendfile(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("sendfile")

    async def sock_accept(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("sock_accept")

    async def sock_connect(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("sock_connect")

    async def sock_recv(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("sock_recv")

    async def sock_recv_into(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("sock_recv_into")

    async def sock_recvfrom(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("sock_recvfrom")

    async def sock_recvfrom_into(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("sock_recvfrom_into")

    async def sock_sendall(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("sock_sendall")

    async def sock_sendfile(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("sock_sendfile")

    async def sock_sendto(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("sock_sendto")

    async def start_tls(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("start_tls")

    async def subprocess_exec(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("subprocess_exec")

    async def subprocess_shell(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("subprocess_shell")

    def add_writer(self, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Not simulated."""
        self._refuse("add_writer")

    def remove_writer(self, *args: Any, **options: Any) -> Any:
        """Not simulated."""
        self._refuse("remove_writer")
