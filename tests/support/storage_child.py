"""A real bookie behind its TCP server, to be killed.

    python -m support.storage_child '{"data_directory": ..., ...}'

The settings are those of `BookieSettings`. Prints "ready PORT PID-OF-THE-JOURNAL-WRITER"; ends with exit code 3 when the
bookie fails, 4 when it cannot be opened, 0 after SIGTERM.
"""

import asyncio
import json
import os
import random
import signal
import sys
from typing import Any

import uvloop

from magnetar.bookie import BookieSettings, open_bookie, os_components
from magnetar.bookie.server import BookieServer
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.connection import ConnectionOptions


def settings_of(text: str) -> BookieSettings:
    """Lists become tuples."""
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(text).items()
    }
    return BookieSettings(**values)


async def main(settings: BookieSettings) -> int:
    """Serves until it is asked to stop."""
    try:
        bookie = await open_bookie(settings, os_components(random.Random()))
    except MagnetarError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 4

    def failed(error: MagnetarError) -> None:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(3)

    bookie.on_failure = failed
    server = await BookieServer.start(bookie, "127.0.0.1", 0, ConnectionOptions("bookie"))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    device = bookie.journals.all[0].device
    sys.stdout.write(f"ready {server.addresses[0][1]} {device.writer_pid}\n")  # type: ignore[attr-defined]
    sys.stdout.flush()
    await stop.wait()
    await server.close(1.0)
    await bookie.close()
    return 0


if __name__ == "__main__":
    sys.exit(uvloop.run(main(settings_of(sys.argv[1]))))
