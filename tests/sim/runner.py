"""Plays seeds of a scenario, each in a process of its own, and says how to play one again.

    python -m sim.runner standalone --seeds 100            # seeds 0..99, two processes at a time
    python -m sim.runner standalone --seeds 20 --twice     # each seed in two processes: the trace hashes must be equal
    python -m sim.runner standalone --seed 17 --trace      # one seed in this process, with every event
    python -m sim.runner ledgers --seeds 100000 --json F   # a soak: the figures so far are in F, also after Ctrl-C
    python -m sim.runner ledgers --defect NAME --seeds 200 # with a planted defect (sim.defects): when is it caught?
    python -m sim.runner ledgers --defect all --seeds 200  # each of them, as a table

PYTHONHASHSEED differs between the processes, so an order that depends on hashes shows as a differing trace. A seed that
fails is printed at once. Exit code 0 means: no seed failed, no trace differed, every fault of the scenario fired at least
once (when enough seeds were played); 1 the opposite; 130 an end before the last seed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from sim import defects
from sim.failed_once import FAILED_ONCE
from sim.report import Report, Tally, replay_command
from sim.worker import Worker, play, scenario_named

__all__ = ["catches", "judge", "main", "play", "play_all", "played", "replay_command"]

JOBS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2  # tests of other workers play beside it
PROGRESS_S = 30.0
HASH_SEEDS_A_ROUND = 1_000_000  # no two workers have the same, least of all the two that play one seed
INTERRUPTED = 130


def played(
    scenario: str, seeds: Sequence[int], *, twice: bool = False, jobs: int = JOBS
) -> Iterator[list[Report]]:
    """The reports of each seed, one or two, as they come: not in the order of the seeds. Ends its processes when closed."""
    waiting = iter(seeds)
    taking = threading.Lock()
    results: queue.Queue[list[Report] | BaseException | None] = queue.Queue(8 * jobs)
    crews = [
        [Worker(1 + 10_000 * job + HASH_SEEDS_A_ROUND * turn) for turn in range(2 if twice else 1)]
        for job in range(min(jobs, len(seeds)))
    ]
    stopping = threading.Event()

    def run(crew: list[Worker]) -> None:
        try:
            while not stopping.is_set():
                with taking:
                    seed = next(waiting, None)
                if seed is None:
                    break
                reports = [worker.play(scenario, seed) for worker in crew]
                if not stopping.is_set():
                    results.put(reports)
            results.put(None)
        except BaseException as error:
            results.put(error)
        finally:
            for worker in crew:
                worker.close()

    threads = [threading.Thread(target=run, args=(crew,), daemon=True) for crew in crews]
    for thread in threads:
        thread.start()
    try:
        working = len(threads)
        while working:
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                working -= 1
            else:
                yield result
    finally:
        stopping.set()
        for worker in itertools.chain(*crews):
            worker.stop()
        for thread in threads:
            while thread.is_alive():
                with contextlib.suppress(queue.Empty):  # it may wait for room
                    results.get_nowait()
                thread.join(0.01)


def play_all(
    scenario: str, seeds: Sequence[int], *, twice: bool = False, jobs: int = JOBS
) -> list[list[Report]]:
    """Reports of each seed, one or two, by seed."""
    return sorted(played(scenario, seeds, twice=twice, jobs=jobs), key=lambda reports: reports[0].seed)


def judge(scenario: str, results: Sequence[Sequence[Report]]) -> list[str]:
    """What is wrong, one text each; empty when all is well."""
    tally = Tally(scenario)
    wrong = [text for reports in results if (text := tally.add(reports))]
    return wrong + tally.missing(scenario_named(scenario)[1])


def soak(
    scenario: str, seeds: Sequence[int], *, twice: bool, jobs: int, progress_s: float, json_path: str
) -> int:
    """Plays and prints: failures at once, a line now and then, a summary at the end, also at an early one. The exit code."""
    tally = Tally(scenario)
    started = time.perf_counter()
    last_progress = started
    code = 0
    try:
        # Not only Ctrl-C: `timeout` and supervisors end a soak by SIGTERM. A background job of a shell inherits a SIGINT
        # that is ignored, for which Python installs no handler of its own.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)
        for reports in played(scenario, seeds, twice=twice, jobs=jobs):
            wrong = tally.add(reports)
            if wrong:
                print(f"{wrong}\n", flush=True)
            now = time.perf_counter()
            if now - last_progress >= progress_s:
                last_progress = now
                write_json(json_path, tally, now - started, "running", seeds)
                print(progress(tally, len(seeds), now - started), flush=True)
    except KeyboardInterrupt:
        code = INTERRUPTED
        print(f"interrupted after {tally.seeds} of {len(seeds)} seeds")
    seconds = time.perf_counter() - started
    missing = tally.missing(scenario_named(scenario)[1])
    write_json(json_path, tally, seconds, "interrupted" if code else "complete", seeds)
    failed = len(tally.failures) + len(missing)
    print("\n".join([*missing, tally.text(seconds)]))
    for seed in sorted(tally.failures):
        print(f"replay: {replay_command(scenario, seed)}")
    print(f"{failed} failed" if failed else "all invariants held", flush=True)
    return code or (1 if failed else 0)


def progress(tally: Tally, seeds: int, seconds: float) -> str:
    """One line of a long run."""
    rate = tally.seeds / seconds
    minutes = round((seeds - tally.seeds) / rate / 60)
    left = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
    return (
        f"{tally.scenario}: {tally.seeds} of {seeds} seeds in {seconds:.0f} s, {rate:.2f} a second, "
        f"{len(tally.failures)} failed, about {left} to go"
    )


def write_json(path: str, tally: Tally, seconds: float, state: str, seeds: Sequence[int]) -> None:
    """The figures so far; whoever reads the file sees all of the old ones or all of the new ones."""
    if not path:
        return
    asked = {"state": state, "first": seeds[0] if seeds else 0, "asked": len(seeds)}
    with open(f"{path}.tmp", "w", encoding="utf-8") as file:
        json.dump({**asked, **tally.figures(seconds)}, file, indent=1)
        file.write("\n")
    os.replace(f"{path}.tmp", path)


def catches(
    worker: Worker, scenario: str, defect: str, seeds: Sequence[int], enough: int
) -> tuple[list[Report], int]:
    """Plays with a planted defect until it was caught `enough` times; returns what caught it, and how many were played."""
    caught: list[Report] = []
    count = 0
    for seed in seeds:
        report = worker.play(scenario, seed, defect)
        count += 1
        if "TypeError" in report.error and f"{defect}.<locals>" in report.error:
            raise RuntimeError(f"the plant {defect} does not fit the code any more:\n{report.error}")
        caught += [report] if report.error else []
        if len(caught) == enough:
            break
    return caught, count


def reason_of(error: str) -> str:
    """The line of a failed run that names what was broken, without the trace behind it."""
    lines = error.strip().splitlines()
    violations = [
        line for line in lines if any(word in line for word in ("Violation: ", "Deadlock: ", "Timeout ("))
    ]
    return (violations or lines[-1:])[-1].rpartition("Violation: ")[2].strip()[:70]


def try_defects(scenario: str, names: Sequence[str], seeds: Sequence[int], enough: int) -> int:
    """A table: after how many seeds each was caught first, and the median from one catch to the next."""
    missed = 0
    worker = Worker(1)
    print(f"{'defect':48} {'first':>6} {'median':>7} {'caught':>7}  by")
    for name in names:
        caught, count = catches(worker, scenario, name, seeds, enough)
        if not caught:
            missed += 1
            print(f"{name:48} not caught by {count} seeds", flush=True)
            continue
        at = [report.seed - seeds[0] + 1 for report in caught]
        gaps = [last - before for before, last in itertools.pairwise([0, *at])]
        reason = Counter(reason_of(report.error) for report in caught).most_common(1)[0][0]
        figures = f"{at[0]:6} {statistics.median(gaps):7.0f} {len(at):3}/{count:<4}"
        print(f"{name:48} {figures} {reason}", flush=True)
    worker.close()
    print(f"{len(names) - missed} of {len(names)} defects were caught")
    return missed


def play_one(scenario: str, seed: int, *, trace: bool) -> int:
    """In this process, for somebody who looks; the exit code."""
    report = play(scenario, seed, echo=trace)
    tally = Tally(scenario)
    tally.add([report])
    print(tally.text(report.seconds), f"\n  trace {report.trace_hash}")
    print(report.error or "all invariants held")
    return 1 if report.error else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="sim.runner", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("scenario", nargs="?", default="standalone")
    parser.add_argument("--seeds", type=int, default=100, help="play the seeds 0..N-1 (or from --first on)")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None, help="play this one seed in this process")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--twice", action="store_true", help="play each seed in two processes and compare")
    parser.add_argument("--failed-once", action="store_true", help="play the seeds of sim.failed_once first")
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument(
        "--progress", type=float, default=PROGRESS_S, help="seconds from one line to the next"
    )
    parser.add_argument(
        "--json", default="", metavar="FILE", help="keep the figures there, while it runs too"
    )
    parser.add_argument("--defect", default="", help="plant a defect of sim.defects, or all in turn")
    parser.add_argument("--catches", type=int, default=5, help="with --defect: stop after so many")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        if options.defect:
            defects.plant(options.defect)
        return play_one(options.scenario, options.seed, trace=options.trace)
    seeds: Sequence[int] = range(options.first, options.first + options.seeds)
    if options.defect:
        names = defects.defects_of(options.scenario) if options.defect == "all" else [options.defect]
        return 1 if try_defects(options.scenario, names, seeds, options.catches) else 0
    if options.failed_once:
        seeds = [*(seed for seed in FAILED_ONCE.get(options.scenario, ()) if seed not in seeds), *seeds]
    return soak(
        options.scenario,
        seeds,
        twice=options.twice,
        jobs=options.jobs,
        progress_s=options.progress,
        json_path=options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
