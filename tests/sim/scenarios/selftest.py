"""A scenario that goes wrong on purpose, so that the runner can be seen to notice.

Seed 3 violates an invariant, seed 5 ends its process, seed 7 lets the order of a set of strings into the trace, seed 9 takes
more memory than a seed may have, seed -1 hangs when most of its time is used up; the others are well. `earlier` counts seeds
that were played in the same process before: none.
"""

from __future__ import annotations

import asyncio
import os
import signal

from sim.worker import SEED_MEMORY_BYTES
from support.sim import SimLoop, Trace

EXPECTED_FAULTS = ("selftest",)
_played: list[int] = []


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See the module."""
    loop = SimLoop(seed, trace=trace)
    _played.append(seed)

    async def main() -> None:
        await asyncio.sleep(1)
        trace.fault("selftest")
        assert seed != 3, "an invariant that does not hold"
        if seed == 5:
            os._exit(9)
        if seed == 9:
            bytes(SEED_MEMORY_BYTES)
        if seed == -1:
            signal.setitimer(signal.ITIMER_PROF, 0.1)
            while True:
                pass
        if seed == 7:
            for name in {f"name-{number}" for number in range(20)}:
                trace.record("order", name)

    loop.run(main())
    loop.close()
    return {"runs": 1, "earlier": len(_played) - 1}
