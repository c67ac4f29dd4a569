"""The bookie protocol over TCP: frames in, engine calls, frames out. WIRE.md draws the rows.

`server` listens, and is the way in for a ledger client of the same process; `connection` is one ledger client, `requests`
says what each command does.
"""

from .server import BookieServer

__all__ = ["BookieServer"]
