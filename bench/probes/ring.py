"""Bare TCP + ring: client process -> TCP -> daemon -> shared-memory ring -> writer (pwrite + fdatasync) -> back.

The least that a durable send through two processes can take here, and the floor that workload (d) is measured against.
`python -m bench.probes.ring DIRECTORY COUNT` prints the percentiles as JSON.
"""

import json
import subprocess
import sys

import uvloop

from bench.probes.ping_pong import ping_pong
from bench.probes.ring_daemon import ANSWER


def main() -> None:
    """Starts the daemon, measures, and lets the daemon end."""
    directory, count = sys.argv[1], int(sys.argv[2])
    daemon = subprocess.Popen(
        [sys.executable, "-m", "bench.probes.ring_daemon", directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert daemon.stdout is not None
    try:
        port = int(daemon.stdout.readline())
        print(json.dumps(uvloop.run(ping_pong(port, len(ANSWER), count))._asdict()))
    finally:
        daemon.communicate()


if __name__ == "__main__":
    main()
