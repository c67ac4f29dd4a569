"""Processes that play seeds: a fresh interpreter that has imported everything, and forks once for each seed.

    runner ──seed──> worker (own PYTHONHASHSEED, plays nothing itself) ──fork──> child plays it, prints its report, exits
           <────────────────────────── report, one line of JSON ───────────────────┘

So each seed finds the same untouched modules, as `--seed N` alone does, whatever was played before it; memory does not grow;
the import (0.6 s, more than a run of ledgers) and the collection of a run's garbage are not paid for each; and a seed that
ends or hangs its process takes no other along.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import IO

from sim import defects
from sim.report import Report, Scenario
from support.sim import Trace

SEED_CPU_S = 60  # a run that needs more hangs in a callback, however busy the machine is
# Address space of the process of a seed, which needs a tenth. No garbage is collected during a run, so one that turns in a
# circle (a planted defect) would else take the machine's memory, and with it whatever runs beside it, before its time is up.
SEED_MEMORY_BYTES = 2 << 30
SEEDS_A_WORKER = 500  # then a fresh one, with another PYTHONHASHSEED
STDERR_BYTES = 6000  # of what a dead child has written to its standard error
TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def scenario_named(name: str) -> tuple[Scenario, tuple[str, ...]]:
    """`play` and `EXPECTED_FAULTS` of the module sim.scenarios.NAME."""
    module = importlib.import_module(f"sim.scenarios.{name}")
    return module.play, module.EXPECTED_FAULTS


def play(scenario: str, seed: int, *, echo: bool = False) -> Report:
    """One seed in this process."""
    function, _ = scenario_named(scenario)
    trace = Trace(echo=print if echo else None)
    logged = logging.root.manager.disable
    if not echo:
        logging.disable(logging.CRITICAL)  # formatting and writing them is a tenth of a run
    report = Report(seed)
    started, used = time.perf_counter(), time.process_time()
    try:
        report.counts = function(seed, trace)
    except Exception as error:
        report.error = "".join(traceback.format_exception(error))
    finally:  # a test plays seeds in its own process
        logging.disable(logged)
    report.seconds, report.cpu_s = time.perf_counter() - started, time.process_time() - used
    report.trace_hash, report.events, report.faults = trace.hexdigest(), trace.events, dict(trace.faults)
    return report


class Worker:
    """The runner's end of a worker process; one seed at a time. Not for two threads at once.

    `hash_seed` is the PYTHONHASHSEED of its first process; each later one has the next.
    """

    def __init__(self, hash_seed: int) -> None:
        self._hash_seed = hash_seed
        self._process: subprocess.Popen[str] | None = None
        self._played = 0  # by this process
        self._stopped = False

    def play(self, scenario: str, seed: int, defect: str = "") -> Report:
        """Plays it, with a defect of sim.defects if one is named.

        A worker that dies over it (one that was killed from outside) is a failure of the seed.
        """
        process = self._process
        if process is None or self._played >= SEEDS_A_WORKER:
            self.close()
            process = self._process = self._start()
        self._played += 1
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{scenario},{seed},{defect}\n")
            process.stdin.flush()
        for line in process.stdout:
            if line.startswith("{"):
                return Report.from_line(line)
        self.close()
        return Report(seed, error=f"the worker process ended with code {process.returncode}")

    def stop(self) -> None:
        """What it plays is given up, and nothing is played any more. For another thread than that which plays and closes."""
        self._stopped = True
        if self._process is not None:
            _kill(self._process)

    def close(self) -> None:
        """Ends the process. May be called again."""
        process, self._process, self._played = self._process, None, 0
        if process is not None:
            _kill(process)
            process.communicate()  # closes the pipes, waits

    def _start(self) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONHASHSEED": str(self._hash_seed), "PYTHONPATH": path}
        self._hash_seed += 1
        process = subprocess.Popen(
            [sys.executable, "-m", "sim.worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the runner, which then ends the whole group
        )
        if self._stopped:
            _kill(process)
        return process


def _kill(worker: subprocess.Popen[str]) -> None:
    """With the child that plays."""
    if worker.returncode is None:  # else its number may be somebody else's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)


def work(requests: IO[str]) -> None:
    """What a worker process does: a fork, and a line on standard output, for each seed that it is asked for."""
    imported: set[str] = set()
    with tempfile.TemporaryFile() as stderr:  # what a child writes to its standard error
        for line in requests:
            scenario, number, defect = line.rstrip("\n").split(",")
            seed = int(number)
            if scenario not in imported:
                scenario_named(scenario)
                imported.add(scenario)
                gc.collect()
                gc.freeze()  # what was imported is shared with all children, and no collection of theirs touches it
            stderr.seek(0)
            stderr.truncate()
            child = os.fork()
            if not child:
                _play_and_exit(scenario, seed, defect, stderr.fileno())
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code:
                stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - STDERR_BYTES))
                text = stderr.read().decode(errors="replace")
                hung = f"Timeout ({SEED_CPU_S} s of CPU): " if code == -signal.SIGPROF else ""
                _write_line(Report(seed, error=f"{hung}the process ended with code {code}\n{text}"))


def _play_and_exit(scenario: str, seed: int, defect: str, standard_error: int) -> None:
    code = 1
    try:
        if defect:
            defects.plant(defect)
        os.dup2(standard_error, 2)
        resource.setrlimit(resource.RLIMIT_AS, (SEED_MEMORY_BYTES, SEED_MEMORY_BYTES))
        faulthandler.register(signal.SIGPROF, chain=True)  # tells where it is, and ends the process
        signal.setitimer(signal.ITIMER_PROF, SEED_CPU_S)
        _write_line(play(scenario, seed))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # nothing of the simulated processes needs to be tidied up


def _write_line(report: Report) -> None:
    data = memoryview(f"{report.to_line()}\n".encode())
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the runner has ended
        work(sys.stdin)
