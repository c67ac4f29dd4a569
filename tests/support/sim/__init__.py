"""A whole cluster in one process, under a seed, in virtual time: loop, network, processes, disk, trace.

Worked case: `SimLoop(seed)` is an asyncio loop; `loop.start_process("broker")` makes a process; tasks spawned in it use
sockets of the simulated network and files of a `SimDisk`; `process.kill()` and `disk.lose_power()` do what they say; the
same seed does the same again, to the byte, in any process.
"""

from support.sim.clock import SimClock
from support.sim.files import SimDisk, SimFile, SimFiles
from support.sim.loop import SimLoop, SimulationDeadlock, SimulationFailed
from support.sim.network import Link, SimNetwork
from support.sim.process import ProcessKilled, SimProcess, current_process
from support.sim.trace import Trace

__all__ = [
    "Link",
    "ProcessKilled",
    "SimClock",
    "SimDisk",
    "SimFile",
    "SimFiles",
    "SimLoop",
    "SimNetwork",
    "SimProcess",
    "SimulationDeadlock",
    "SimulationFailed",
    "Trace",
    "current_process",
]
