"""`honcho` with time for all of the cluster to stop: its arguments are honcho's.

Of itself honcho kills whatever runs 5 s after the first process of the Procfile has ended, and that is the table, at once. A
broker may drain for 10 s, the bookies that it needs for as long after it, and only then ZooKeeper stops.
"""

from __future__ import annotations

import honcho.command
import honcho.manager

__all__ = ["main"]

STOP_S = 60


def main() -> None:
    """Ends as honcho does: with code 130 after Ctrl-C."""
    honcho.manager.KILL_WAIT = STOP_S
    honcho.command.main()


if __name__ == "__main__":
    main()
