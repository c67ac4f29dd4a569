"""`make demo`: a service plays 336,776 real flights to a tailing reader and two workers, and is killed in the middle.

What it proves, and how:

* nothing confirmed is lost: every flight whose receipt the producer got arrived, with the same content, at the reader and at
  a worker;
* nothing acknowledged with a receipt came back: no message id was handed to any worker after any worker had its receipt;
* duplicates are counted and shown: the producer sends again what was unconfirmed when the service died, and there is no
  deduplication yet. First occurrences stay in order.

Exit code 0 only if nothing was lost, altered, out of order or redelivered. Bars on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as missing:
    sys.exit(
        "demo: it needs the server packages: "
        f"pip install '.[server]' in Magnetar's folder  (missing: {missing.name})"
    )

from bench.service_process import ServiceFailed, ServiceProcess

from .demo_display import Bars, Lines
from .demo_flights import FLIGHTS, DemoDataMissing, flights_path
from .demo_roles import Record

DEFAULT_SECONDS = 18.0  # of producing; start, end and checks come on top
WORKERS = 2
END_TIMEOUT_S = 60.0
CROSSING_S = 0.2


class DemoFailed(Exception):
    """A process of the demo failed; the text says which and why."""


@dataclass
class Child:
    """One process of the demo and the last figures that it printed."""

    name: str
    process: asyncio.subprocess.Process
    record: Path
    figures: dict[str, int] = field(default_factory=dict)
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def ask_to_finish(self) -> None:
        """One line on its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"finish\n")


@dataclass
class Outcome:
    """The figures of the table at the end."""

    flights: int
    confirmed: int
    failed: int
    tailed: int
    worked: int
    lost_tail: int
    lost_work: int
    altered: int
    stored_twice: int
    out_of_order: int
    redelivered: int
    crossed: int  # delivered to one worker while the receipt was on its way to the other: allowed
    returned: int  # delivered again without a receipt: allowed
    acknowledged: int
    away_s: float
    seconds: float

    @property
    def good(self) -> bool:
        """What the exit code says."""
        return (
            self.lost_tail
            + self.lost_work
            + self.altered
            + self.redelivered
            + self.out_of_order
            + self.failed
        ) == 0 and self.confirmed == self.flights


class Demo:
    """Owns the service and the four processes."""

    def __init__(self, arguments: argparse.Namespace, directory: Path, console: Console) -> None:
        self.count: int = arguments.count
        self.rate = arguments.count / arguments.seconds
        self.directory = directory
        self.console = console
        self.service = ServiceProcess(
            arguments.data or directory / "data", arguments=["--log-level", "warning"]
        )
        self.display: Bars | Lines = (
            Bars(console, self.count) if console.is_terminal else Lines(console, self.count)
        )
        self.children: dict[str, Child] = {}
        self.watchers: list[asyncio.Task[None]] = []
        self.away_s = 0.0

    async def run(self) -> Outcome:
        """Plays everything once. Raises DemoFailed or ServiceFailed."""
        self.console.print(
            "A producer sends flights, a reader tails them, two workers share and acknowledge them. Halfway the service is "
            "killed."
        )
        await asyncio.to_thread(self.service.start)
        self.console.print(
            f"service ready in {self.service.ready_after_s:.2f} s: {self.service.url}", highlight=False
        )
        async with self._children():
            with self.display:
                began = time.monotonic()
                await self._play()
                seconds = time.monotonic() - began
        return await asyncio.to_thread(self._compare, seconds)

    async def _play(self) -> None:
        showing = asyncio.create_task(self._show())
        try:
            for name in ("reader", *worker_names()):
                await self._start(name)
            await self._until(lambda: all(child.ready.is_set() for child in self.children.values()))
            producer = await self._start("producer")
            await self._until(lambda: producer.figures.get("sent", 0) >= self.count // 2)
            await self._kill_and_restart()
            await self._until(lambda: producer.process.returncode is not None)
            for name, child in self.children.items():
                if name != "producer":
                    child.ask_to_finish()
            async with asyncio.timeout(END_TIMEOUT_S):
                await asyncio.gather(*self.watchers)
        finally:
            showing.cancel()
            self._show_figures()

    async def _kill_and_restart(self) -> None:
        pid = self.service.pid
        self.display.say(f"kill -9 {pid}: the service dies, in the middle of everything")
        began = time.monotonic()
        await asyncio.to_thread(self.service.kill, "daemon")
        await asyncio.to_thread(self.service.start)
        self.away_s = time.monotonic() - began
        self.display.say(
            f"started again on the same data: recovered and ready in {self.service.ready_after_s:.2f} s; "
            "clients reconnect by themselves"
        )

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition; raises as soon as a process of the demo has failed."""
        while not condition():
            for watcher in self.watchers:
                if watcher.done():
                    watcher.result()
            await asyncio.sleep(0.02)
        for watcher in self.watchers:
            if watcher.done():
                watcher.result()

    async def _start(self, name: str) -> Child:
        record = self.directory / f"{name}.record"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "deploy.demo.demo_roles", name.partition("-")[0]),
            *("--url", self.service.url, "--count", str(self.count), "--rate", str(self.rate)),
            *("--out", str(record)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        child = self.children[name] = Child(name, process, record)
        self.watchers.append(asyncio.create_task(self._watch(child)))
        return child

    async def _watch(self, child: Child) -> None:
        assert child.process.stdout is not None
        failure = ""
        async for line in child.process.stdout:
            event: dict[str, Any] = json.loads(line)
            kind = event.pop("event")
            if kind == "ready":
                child.ready.set()
            elif kind == "progress":
                child.figures = event
            elif kind == "failed":
                failure = str(event["message"])
        if await child.process.wait() != 0:
            raise DemoFailed(f"the {child.name} failed: {failure or 'see above'}")
        child.ready.set()

    @contextlib.asynccontextmanager
    async def _children(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for child in self.children.values():
                if child.process.returncode is None:
                    child.process.terminate()
            await asyncio.gather(*self.watchers, return_exceptions=True)
            if self.service.running:
                await asyncio.to_thread(self.service.stop)

    async def _show(self) -> None:
        while True:
            self._show_figures()
            await asyncio.sleep(self.display.interval_s)

    def _show_figures(self) -> None:
        self.display.show(
            figures_of({name: child.figures for name, child in self.children.items()}, self.count)
        )

    def _compare(self, seconds: float) -> Outcome:
        producer, reader, *workers = (
            Record.load(self.children[name].record) for name in ("producer", "reader", *worker_names())
        )
        handled = Record.empty(self.count)
        for worker in workers:
            for number, digest in enumerate(worker.hashes):
                if digest:
                    handled.hashes[number] = digest
        lost_tail = lost_work = altered = 0
        for sent, tailed, worked in zip(producer.hashes, reader.hashes, handled.hashes, strict=True):
            if sent:
                lost_tail += not tailed
                lost_work += not worked
                altered += (tailed not in (0, sent)) or (worked not in (0, sent))
        redelivered, crossed, returned, acknowledged = count_redeliveries(workers)
        return Outcome(
            flights=self.count,
            confirmed=producer.distinct,
            failed=self.children["producer"].figures.get("failed", 0),
            tailed=reader.distinct,
            worked=handled.distinct,
            lost_tail=lost_tail,
            lost_work=lost_work,
            altered=altered,
            stored_twice=reader.duplicates,
            out_of_order=reader.out_of_order,
            redelivered=redelivered,
            crossed=crossed,
            returned=returned,
            acknowledged=acknowledged,
            away_s=self.away_s,
            seconds=seconds,
        )


def figures_of(children: Mapping[str, Mapping[str, int]], count: int) -> dict[str, int]:
    """What the display shows, of what each process said last.

    What was tailed or worked has been produced, though the producer has not said so yet.
    """

    def figure(child: str, name: str) -> int:
        return children.get(child, {}).get(name, 0)

    found = {
        "confirmed": figure("producer", "confirmed"),
        "tailed": figure("reader", "tailed") - figure("reader", "duplicates"),
        # Two workers may have one message each, after the kill: the table at the end counts distinct ones.
        "worked": min(count, sum(figure(name, "acknowledged") for name in worker_names())),
    }
    return {"produced": max(figure("producer", "sent"), *found.values()), **found}


def count_redeliveries(workers: Sequence[Record]) -> tuple[int, int, int, int]:
    """How many deliveries came after the receipt, crossed it, or came again without one; and how many receipts there are.

    When the service dies, what a worker holds goes to the first one that comes back, and the worker that held it may still
    get its acknowledgement through. A delivery that is older than that receipt can wait in the other worker's queue for a
    moment: it has crossed. A service that lost a cursor delivers after its restart, which takes longer than such a moment.
    """
    receipts: dict[bytes, tuple[float, Record]] = {}
    for worker in workers:
        for identity, when in worker.receipts:
            if identity not in receipts or when < receipts[identity][0]:
                receipts[identity] = (when, worker)
    redelivered = crossed = deliveries = 0
    seen: set[bytes] = set()
    for worker in workers:
        for identity, when in worker.received:
            deliveries += 1
            seen.add(identity)
            if identity not in receipts or when <= receipts[identity][0]:
                continue
            if worker is not receipts[identity][1] and when <= receipts[identity][0] + CROSSING_S:
                crossed += 1
            else:
                redelivered += 1
    return redelivered, crossed, deliveries - len(seen) - redelivered - crossed, len(receipts)


def worker_names() -> list[str]:
    """worker-1, worker-2."""
    return [f"worker-{number}" for number in range(1, WORKERS + 1)]


def table(outcome: Outcome) -> Table:
    """The table at the end."""
    result = Table(title="What happened", title_justify="left", show_header=False, min_width=72)
    result.add_column("what")
    result.add_column("figure", justify="right")
    result.add_column("how it is known")

    def row(what: str, figure: int | float | str, how: str, *, must_be_zero: bool = False) -> None:
        text = f"{figure:,}" if isinstance(figure, int) else str(figure)
        if must_be_zero:
            text = f"[bold green]{text}[/]" if figure == 0 else f"[bold red]{text}[/]"
        result.add_row(what, text, how)

    row("produced", outcome.flights, "flights, one JSON message each, keyed by carrier")
    row("confirmed", outcome.confirmed, "receipts at the producer: synced to the disk")
    row("tailed", outcome.tailed, "distinct flights at the tailing reader")
    row("worked", outcome.worked, f"distinct flights at {WORKERS} workers of one Shared subscription")
    row("acknowledged", outcome.acknowledged, "messages whose acknowledgement has a durable receipt")
    result.add_section()
    row(
        "lost",
        outcome.lost_tail + outcome.lost_work,
        "confirmed, but not tailed or not worked",
        must_be_zero=True,
    )
    row("altered", outcome.altered, "arrived with other content", must_be_zero=True)
    row("out of order", outcome.out_of_order, "first occurrences at the reader", must_be_zero=True)
    row("redelivered", outcome.redelivered, "handed out again after its receipt", must_be_zero=True)
    if outcome.failed:
        row("refused", outcome.failed, "sends that failed for good at the producer", must_be_zero=True)
    result.add_section()
    row("stored twice", outcome.stored_twice, "sent again after the kill; allowed without deduplication")
    row("returned", outcome.returned, "delivered again without a receipt; allowed")
    if outcome.crossed:
        row("crossed", outcome.crossed, "on their way to one worker when the other got its receipt; allowed")
    row("away", f"{outcome.away_s:.2f} s", "from kill -9 to ready again, with recovery")
    row(
        "rate",
        f"{outcome.flights / outcome.seconds:,.0f}/s",
        "throttled, so that you can watch; see make bench",
    )
    return result


def arguments_of(line: list[str]) -> argparse.Namespace:
    """Options of the demo."""
    parser = argparse.ArgumentParser(
        prog="deploy.demo.demo", description="Plays real flights through a real service."
    )
    parser.add_argument(
        "--flights",
        type=int,
        default=FLIGHTS,
        dest="count",
        help="how many flights (default: all %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=DEFAULT_SECONDS, help="how long to produce (default: %(default)s)"
    )
    parser.add_argument(
        "--data", help="keep the service's data here (default: a temporary directory, deleted)"
    )
    arguments = parser.parse_args(line)
    if not 1 <= arguments.count <= FLIGHTS or arguments.seconds <= 0:
        parser.error(f"--flights must be from 1 to {FLIGHTS}, --seconds must be positive")
    return arguments


async def _play(demo: Demo) -> Outcome:
    """Ctrl-C and SIGTERM cancel the demo, which stops everything that it started."""
    task = asyncio.ensure_future(demo.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    return await task


def main(line: list[str] | None = None) -> int:
    """Returns the exit code."""
    arguments = arguments_of(sys.argv[1:] if line is None else line)
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    directory = Path(tempfile.mkdtemp(prefix="magnetar-demo-"))
    try:
        flights_path()
        outcome = asyncio.run(_play(Demo(arguments, directory, console)))
    except (DemoDataMissing, DemoFailed, ServiceFailed) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("demo: stopped", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    console.print(table(outcome))
    if outcome.good:
        console.print("Nothing acknowledged was lost, and nothing acknowledged came back.", style="green")
    else:
        console.print("This must not happen: please report it together with the table.", style="bold red")
    console.print(
        "Next: README.md has a five-minute tour; `make run` starts a service to play with; `make bench` shows how fast it "
        "is here; ARCHITECTURE.md says how it works."
    )
    return 0 if outcome.good else 1


if __name__ == "__main__":
    sys.exit(main())
