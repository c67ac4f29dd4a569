"""A word to the supervisor that started this process: the protocol sd_notify of systemd, a datagram to NOTIFY_SOCKET.

READY=1       `systemctl start` and `restart` return now, and units that come after this one are started
STOPPING=1    it was asked to stop
"""

from __future__ import annotations

import contextlib
import socket


def notify_supervisor(address: str, state: str) -> None:
    """Does nothing when `address` is empty, or nobody listens there: the supervisor has a time limit of its own."""
    if not address.startswith(("/", "@")):
        return
    name = "\0" + address[1:] if address[0] == "@" else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), name)
