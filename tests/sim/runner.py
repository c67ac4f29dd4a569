"""Plays seeds of a scenario in fresh processes, and says how to play one again.

    python -m sim.runner standalone --seeds 100            # seeds 0..99, two processes at a time
    python -m sim.runner standalone --seeds 20 --twice     # each seed in two processes: the trace hashes must be equal
    python -m sim.runner standalone --seed 17 --trace      # one seed in this process, with every event
    python -m sim.runner ledgers --defect NAME --seeds 200 # with a planted defect (sim.defects): when is it caught?
    python -m sim.runner ledgers --defect all --seeds 200  # each of them, as a table

PYTHONHASHSEED differs between the processes, so an order that depends on hashes shows as a differing trace. Exit code 0
means: no seed failed, no trace differed, every fault of the scenario fired at least once (when enough seeds were played).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import faulthandler
import gc
import importlib
import itertools
import logging
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence

from sim import defects
from sim.report import Report, Scenario
from support.sim import Trace

JOBS = 2
RUNNER = (sys.executable, "-m", "sim.runner")
CHUNK = 10  # seeds a process; then a fresh one
SEED_TIMEOUT_S = 60.0  # real seconds; a run that needs more hangs in a callback
SEEDS_FOR_FAULTS = 20  # from so many on, each expected fault must have fired
TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def scenario_named(name: str) -> tuple[Scenario, tuple[str, ...]]:
    """`play` and `EXPECTED_FAULTS` of the module sim.scenarios.NAME."""
    module = importlib.import_module(f"sim.scenarios.{name}")
    return module.play, module.EXPECTED_FAULTS


def replay_command(scenario: str, seed: int, defect: str = "") -> str:
    """What a person types to see it again."""
    planted = f" --defect {defect}" if defect else ""
    return f"PYTHONPATH=tests .venv/bin/python -m sim.runner {scenario}{planted} --seed {seed} --trace"


def play(scenario: str, seed: int, *, echo: bool = False) -> Report:
    """One seed in this process."""
    function, _ = scenario_named(scenario)
    trace = Trace(echo=print if echo else None)
    if not echo:
        logging.disable(logging.CRITICAL)  # formatting and writing them is a tenth of a run
    report = Report(seed)
    started = time.perf_counter()
    try:
        report.counts = function(seed, trace)
    except Exception as error:
        report.error = "".join(traceback.format_exception(error))
    report.seconds = time.perf_counter() - started
    report.trace_hash, report.events, report.faults = trace.hexdigest(), trace.events, dict(trace.faults)
    return report


def work(scenario: str, seeds: Sequence[int]) -> int:
    """What a worker process does: a line per seed on standard output."""
    for seed in seeds:
        faulthandler.dump_traceback_later(SEED_TIMEOUT_S, exit=True)
        print(play(scenario, seed).to_line(), flush=True)
        faulthandler.cancel_dump_traceback_later()
        gc.collect()
    sys.stdout.flush()
    os._exit(0)  # nothing of the dead simulated processes needs to be tidied up


def play_in_process(scenario: str, seeds: Sequence[int], hash_seed: int, defect: str = "") -> list[Report]:
    """Seeds in one fresh process. A seed that ends the process is reported as failed, and the rest goes on in the next."""
    path = os.pathsep.join(filter(None, (TESTS, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path}
    reports: list[Report] = []
    while len(reports) < len(seeds):
        rest = list(seeds[len(reports) :])
        command = [*RUNNER, scenario, "--worker", ",".join(map(str, rest)), "--defect", defect]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        reports += [Report.from_line(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if len(reports) < len(seeds):
            error = f"the process ended with code {done.returncode}\n{done.stderr[-6000:]}"
            reports.append(Report(seeds[len(reports)], error=error))
    return reports


def play_all(
    scenario: str, seeds: Sequence[int], *, twice: bool = False, jobs: int = JOBS
) -> list[list[Report]]:
    """Reports of each seed, one or two."""
    chunk = max(1, min(CHUNK, -(-len(seeds) // jobs)))
    chunks = [seeds[start : start + chunk] for start in range(0, len(seeds), chunk)]
    rounds = range(2 if twice else 1)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [
            [pool.submit(play_in_process, scenario, chunk, 1 + index + 1000 * turn) for turn in rounds]
            for index, chunk in enumerate(chunks)
        ]
        return [list(same) for pair in futures for same in zip(*[future.result() for future in pair])]


def judge(scenario: str, results: Sequence[Sequence[Report]]) -> list[str]:
    """What is wrong, one text each; empty when all is well."""
    wrong: list[str] = []
    faults: Counter[str] = Counter()
    for reports in results:
        first = reports[0]
        faults.update(first.faults)
        if first.error:
            wrong.append(
                f"seed {first.seed} failed:\n{first.error}\nreplay: {replay_command(scenario, first.seed)}"
            )
        elif any(report.trace_hash != first.trace_hash for report in reports):
            hashes = " and ".join(f"{report.trace_hash} ({report.events} events)" for report in reports)
            wrong.append(
                f"seed {first.seed} is not deterministic: {hashes}\nreplay: {replay_command(scenario, first.seed)}"
            )
    if len(results) >= SEEDS_FOR_FAULTS:
        _, expected = scenario_named(scenario)
        wrong += [f"the fault {name!r} never fired" for name in expected if not faults[name]]
    return wrong


def summary(scenario: str, results: Sequence[Sequence[Report]], seconds: float) -> str:
    """Counts over all seeds, for people."""
    counts: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for reports in results:
        counts.update(reports[0].counts)
        faults.update(reports[0].faults)
    lines = [f"{scenario}: {len(results)} seeds, {sum(map(len, results))} runs in {seconds:.1f} s"]
    lines += ["  " + "  ".join(f"{name}={number}" for name, number in sorted(counts.items()))]
    lines += ["  faults: " + "  ".join(f"{name}={number}" for name, number in sorted(faults.items()))]
    return "\n".join(lines)


def catches(scenario: str, defect: str, seeds: Sequence[int], enough: int) -> tuple[list[Report], int]:
    """Plays with a planted defect until it was caught `enough` times; returns what caught it, and how many were played."""
    caught: list[Report] = []
    played = 0
    while played < len(seeds) and len(caught) < enough:
        for report in play_in_process(scenario, seeds[played : played + CHUNK], 1, defect):
            if len(caught) < enough:
                played += 1
                caught += [report] if report.error else []
    return caught, played


def reason_of(error: str) -> str:
    """The line of a failed run that names what was broken, without the trace behind it."""
    lines = error.strip().splitlines()
    told = [line for line in lines if "Violation: " in line or "Deadlock: " in line]
    return (told or lines[-1:])[-1].rpartition("Violation: ")[2].strip()[:70]


def try_defects(scenario: str, names: Sequence[str], seeds: Sequence[int], enough: int) -> int:
    """A table: after how many seeds each was caught first, and the median from one catch to the next."""
    missed = 0
    print(f"{'defect':48} {'first':>6} {'median':>7} {'caught':>7}  by")
    for name in names:
        caught, played = catches(scenario, name, seeds, enough)
        if not caught:
            missed += 1
            print(f"{name:48} not caught by {played} seeds", flush=True)
            continue
        at = [report.seed - seeds[0] + 1 for report in caught]
        gaps = [last - before for before, last in itertools.pairwise([0, *at])]
        reason = Counter(reason_of(report.error) for report in caught).most_common(1)[0][0]
        figures = f"{at[0]:6} {statistics.median(gaps):7.0f} {len(at):3}/{played:<4}"
        print(f"{name:48} {figures} {reason}", flush=True)
    print(f"{len(names) - missed} of {len(names)} defects were caught")
    return missed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="sim.runner", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scenario", nargs="?", default="standalone")
    parser.add_argument("--seeds", type=int, default=100, help="play the seeds 0..N-1 (or from --first on)")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None, help="play this one seed in this process")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--twice", action="store_true", help="play each seed in two processes and compare")
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--defect", default="", help="plant a defect of sim.defects, or all in turn")
    parser.add_argument("--catches", type=int, default=5, help="with --defect: stop after so many")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.defect and (options.worker or options.seed is not None):
        defects.plant(options.defect)
    if options.worker:
        return work(options.scenario, [int(seed) for seed in options.worker.split(",")])
    if options.seed is not None:
        report = play(options.scenario, options.seed, echo=options.trace)
        print(summary(options.scenario, [[report]], report.seconds), f"\n  trace {report.trace_hash}")
        print(report.error or "all invariants held")
        return 1 if report.error else 0
    seeds = range(options.first, options.first + options.seeds)
    if options.defect:
        names = list(defects.DEFECTS) if options.defect == "all" else [options.defect]
        return 1 if try_defects(options.scenario, names, seeds, options.catches) else 0
    started = time.perf_counter()
    results = play_all(options.scenario, seeds, twice=options.twice, jobs=options.jobs)
    wrong = judge(options.scenario, results)
    print("\n\n".join([*wrong, summary(options.scenario, results, time.perf_counter() - started)]))
    print(f"{len(wrong)} failed" if wrong else "all invariants held")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
