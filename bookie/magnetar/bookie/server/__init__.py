"""The bookie protocol over TCP: frames in, engine calls, frames out. WIRE.md draws the rows.

`server` listens, `connection` is one ledger client, `requests` says what each command does, `paused_connections` is what
happens while the write cache is full.
"""

from .server import BookieServer

__all__ = ["BookieServer"]
