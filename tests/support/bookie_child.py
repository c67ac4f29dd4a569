"""A bookie process to be killed: `python -m support.bookie_child DIRECTORY MODE FIRST`.

Writes lines to its standard output: "writer PID", then "acked LEDGER ENTRY" for every acknowledged entry. Several adds
are in flight at any time, from `FIRST` on, in two ledgers, with payloads of many sizes. Ends with exit code 3 when the
bookie fails.
"""

import asyncio
import os
import sys

import uvloop

from magnetar.proto.errors import MagnetarError
from support.bookie_kit import entry, open_real

IN_FLIGHT = 32


def payload(ledger_id: int, number: int) -> bytes:
    """What entry `number` holds: a few bytes, pages, and everything between."""
    return b"%d:%d." % (ledger_id, number) * (1 + number * 7919 % 3000)


async def main(directory: str, mode: str, first: int) -> None:
    """Adds until it is killed."""
    bookie = await open_real(
        directory, writer_mode=mode, checkpoint_interval_s=0.05, journal_file_bytes=1 << 20
    )
    device = bookie.journals.all[0]._device
    lines = os.fdopen(1, "w", buffering=1)
    lines.write(f"writer {device.writer_pid}\n")  # type: ignore[attr-defined]

    def failed(error: MagnetarError) -> None:
        sys.stderr.write(f"{error}\n")
        os._exit(3)

    bookie.on_failure = failed
    room = asyncio.Semaphore(IN_FLIGHT)

    def done(ledger_id: int, entry_id: int, code: int) -> None:
        room.release()
        if code == 0:
            lines.write(f"acked {ledger_id} {entry_id}\n")

    number = first
    while True:
        await room.acquire()
        ledger_id = number % 2
        bookie.add(entry(ledger_id, number, payload(ledger_id, number)), recovery=False, done=done)
        number += 1


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
