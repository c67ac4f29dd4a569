"""What happened in a simulated run, as a hash and, when asked for, as text.

Two runs of one seed must have the same trace hash in two processes (CORRECTNESS.md, scorecard 3). So what is recorded
holds no address, no object's repr and no real time: virtual time, the number of callbacks run so far, and what the
caller gives. The number of callbacks makes the hash sensitive to everything that the loop did between two events.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import xxhash

TAIL_LINES = 400


class Trace:
    """The events of one run. `faults` counts the faults that fired, by name."""

    def __init__(self, *, echo: Callable[[str], None] | None = None) -> None:
        self._hash = xxhash.xxh3_128()
        self._echo = echo
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)  # what led to a failure, at no great cost
        self.events = 0
        self.faults: Counter[str] = Counter()
        self.now: Callable[[], tuple[float, int]] = lambda: (0.0, 0)  # virtual seconds, callbacks run

    def record(self, kind: str, *fields: object) -> None:
        """Adds one event. `fields` must print the same in every process."""
        seconds, steps = self.now()
        line = f"{seconds:.6f} {steps} {kind} {' '.join(map(str, fields))}"
        self._hash.update(line.encode())
        self.events += 1
        self._tail.append(line)
        if self._echo is not None:
            self._echo(line)

    def fault(self, name: str, *fields: object) -> None:
        """Adds an event that is a fault, and counts it."""
        self.faults[name] += 1
        self.record(f"FAULT {name}", *fields)

    def tail(self, lines: int = 40) -> str:
        """The last events as text."""
        return "\n".join(list(self._tail)[-lines:])

    def hexdigest(self) -> str:
        """The hash of all events so far."""
        return self._hash.hexdigest()


def digest(data: bytes | bytearray | memoryview) -> str:
    """A short hash of bytes, for a field of an event."""
    return xxhash.xxh3_64_hexdigest(data)[:8]
