"""What subscriptions of every type can do: a real service and its clients as processes on loopback, fsync on.

    python -m bench subscriptions [--only a,b,...] [--quick] [--rounds N] [--json FILE]

Messages of 100 bytes. Each part has a service of its own:
(a) Shared: a backlog, taken by two processes with a consumer each, who acknowledge each message by itself, or each batch as
    it arrived; stored in client batches of 1,000 and unbatched.
(b) Key_Shared: a backlog with 1,000 keys, taken by four consumers in two processes; batched by key, 10 messages of each
    key or 1 in a call of send_many with 1,000, and unbatched.
(c) Failover: the active consumer closes, or its process is killed: until the next consumer has a message.
(d) One consumer of 1,000 topics, by list and by pattern: time to subscribe, then a backlog.

Rates are from the moment when consumers that are connected are told to begin until nothing is left to acknowledge. Beside
them: microseconds of CPU a message by process, and resident memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from bench.arguments import OUT, console, parser_of
from bench.probes import Others
from bench.service_process import ServiceProcess
from bench.services import Measured, client_line
from bench.workloads.subscriptions import SUBSCRIPTION
from magnetar.client import Client, connect

SIZE = 100
POLL_S = 0.01


class Goal(NamedTuple):
    """What is asked of a figure."""

    limit: float
    higher: bool = True


GOALS = {
    "shared, batched": Goal(900_000),
    "shared, unbatched": Goal(400_000),
    "key_shared, batched by key": Goal(300_000),
    "key_shared, unbatched": Goal(200_000),
    "failover, closed": Goal(100, higher=False),
}


class Process:
    """A client process: tells by lines of JSON how far it is, and is told by lines what is next."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        assert process.stdout is not None
        assert process.stdin is not None
        self._lines, self._orders = process.stdout, process.stdin

    @classmethod
    async def start(cls, url: str, workload: str, topic: str, **parameters: Any) -> Process:
        """Runs it."""
        process = await asyncio.create_subprocess_exec(
            *client_line(url, workload, topic, parameters),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 26,
        )
        return cls(process)

    async def line(self) -> dict[str, Any]:
        """The next that it tells. Raises SystemExit when it has ended."""
        line = await self._lines.readline()
        if not line:
            raise SystemExit("bench subscriptions: a client process has ended; its error is above")
        found: dict[str, Any] = json.loads(line)
        return found

    def go_on(self) -> None:
        """Tells it to."""
        self._orders.write(b"\n")

    async def result(self) -> dict[str, Any]:
        """The last that it tells, with cpu_s."""
        while "cpu_s" not in (found := await self.line()):
            pass
        await self._process.wait()
        return found

    async def kill(self) -> None:
        """With SIGKILL, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class Bench:
    """The parts, and what they found."""

    def __init__(self, directory: Path, say: Callable[[str], None], *, quick: bool) -> None:
        self._directory = directory
        self._say = say
        self._part = 4 if quick else 1
        self.found: list[dict[str, Any]] = []

    def _messages(self, count: int) -> int:
        return count // self._part // 1_000 * 1_000

    def _note(self, name: str, value: float, unit: str, **details: Any) -> None:
        self.found.append({"name": name, "value": value, "unit": unit, **details})
        goal = GOALS.get(name)
        verdict = ""
        if goal is not None:
            reached = value >= goal.limit if goal.higher else value <= goal.limit
            verdict = "reached" if reached else f"MISSED, wanted {goal.limit:,}"
        cpu = details.get("cpu_us_per_message", {})
        shown = ", ".join(f"{role} {us:.2f}" for role, us in cpu.items() if us >= 0.005)
        rest = ", ".join(
            f"{key} {_shown(part)}" for key, part in details.items() if key != "cpu_us_per_message"
        )
        self._say(f"{name:44}{value:>12,.1f} {unit:6} {verdict:22} {'us: ' + shown if shown else ''} {rest}")

    @contextlib.asynccontextmanager
    async def _service(self, *arguments: str) -> AsyncIterator[ServiceProcess]:
        data = self._directory / f"data-{time.time_ns()}"
        service = ServiceProcess(data, arguments=["--log-level", "warning", *arguments])
        service.start()
        try:
            yield service
        finally:
            if service.running:
                service.stop()
            shutil.rmtree(data, ignore_errors=True)

    # --- (a), (b) ----------------------------------------------------------------------------------------------------

    async def shared(self) -> None:
        """(a)"""
        for how, batch, count in (("batched", 1_000, 4_000_000), ("unbatched", 1, 1_600_000)):
            for by_batch in (False, True):
                messages = self._messages(count)
                fill = {"workload": "fill", "messages": messages, "size": SIZE, "batch": batch}
                name = f"shared, {how}" + (", a batch at a time" if by_batch else "")
                await self._take(name, fill, type="shared", consumers=1, by_batch=by_batch)

    async def key_shared(self) -> None:
        """(b)"""
        for how, together, batched, count in (
            ("batched by key", 10, True, 1_500_000),
            ("batched by key, one of a key in a call", 1, True, 400_000),
            ("unbatched", 1, False, 800_000),
        ):
            for by_batch in (False, True):
                messages = self._messages(count)
                fill = {"workload": "fill_keys", "messages": messages, "size": SIZE, "keys": 1_000,
                        "together": together, "batched": batched}  # fmt: skip
                name = f"key_shared, {how}" + (", a batch at a time" if by_batch else "")
                await self._take(name, fill, type="key_shared", consumers=2, by_batch=by_batch)

    async def _take(self, name: str, fill: dict[str, Any], **consumers: Any) -> None:
        """A backlog, by two processes with so many consumers each."""
        async with self._service() as service, connect(service.url) as client:
            takers = [await Process.start(service.url, "take", "t", **consumers) for _ in range(2)]
            for taker in takers:
                await taker.line()
            await (await Process.start(service.url, topic="t", **fill)).result()
            messages, resident = fill["messages"], service.resident_bytes()["daemon"]
            measured, others = Measured([service]), Others()
            began = time.perf_counter()
            for taker in takers:
                taker.go_on()
            seconds = await self._acknowledged(client, "t") - began
            found = measured.result()
            for taker in takers:
                taker.go_on()
            results = [await taker.result() for taker in takers]
            assert sum(result["messages"] for result in results) == messages, results
            cpu = found["cpu_s"] | {f"client {n}": result["cpu_s"] for n, result in enumerate(results)}
            self._note(
                name, messages / seconds, "msg/s",
                cpu_us_per_message={role: s * 1e6 / messages for role, s in cpu.items()},
                seen=[result["seen"] for result in results], seconds=seconds,
                resident_mb=[resident / 1e6, service.resident_bytes()["daemon"] / 1e6], others=others.share(),
            )  # fmt: skip

    async def _acknowledged(self, client: Client, topic: str, timeout_s: float = 60.0) -> float:
        """When nothing was left to acknowledge. Raises SystemExit after a minute: something stalls."""
        began = time.perf_counter()
        while True:
            subscription = (await client.admin.topic_stats(topic))["subscriptions"][SUBSCRIPTION]
            now = time.perf_counter()
            if not subscription["backlog_messages"]:
                return now
            if now - began > timeout_s:
                raise SystemExit(f"bench subscriptions: {topic} stalls: {json.dumps(subscription)}")
            await asyncio.sleep(POLL_S)

    # --- (c) ---------------------------------------------------------------------------------------------------------

    async def failover(self) -> None:
        """(c)"""
        async with self._service() as service:
            producer = await Process.start(service.url, "paced", "t", rate=1_000, keys=10, batched=False)
            await producer.line()
            for name in ("closed", "killed"):
                times: list[float] = []
                members = [await self._member(service)]
                await members[0].line()  # its first message
                for _ in range(8 // self._part):
                    members.append(await self._member(service))
                    await asyncio.sleep(0.3)  # what it takes over is all that is under way
                    active = members.pop(0)
                    if name == "closed":
                        active.go_on()
                        began = (await active.line())["closing"]
                    else:
                        began = time.perf_counter()
                        await active.kill()
                    times.append(((await members[0].line())["first"] - began) * 1e3)
                    if name == "closed":
                        await active.result()
                await members[0].kill()
                self._note(
                    f"failover, {name}", max(times), "ms", median=statistics.median(times), times=len(times)
                )
            producer.go_on()
            await producer.result()

    async def _member(self, service: ServiceProcess) -> Process:
        member = await Process.start(service.url, "fail_over", "t")
        await member.line()
        return member

    # --- (d) ---------------------------------------------------------------------------------------------------------

    async def topics(self) -> None:
        """(d)"""
        topics = 1_000 // self._part
        for how, batch, each in (("batched", 100, 1_000), ("unbatched", 1, 200)):
            for pattern, queue in ((False, None), (True, None), (False, 50_000)):
                async with self._service() as service:
                    idle = service.resident_bytes()["daemon"]
                    fill = {"topics": topics, "messages": each, "size": SIZE, "batch": batch}
                    await (await Process.start(service.url, "fill_topics", "t", **fill)).result()
                    loaded = service.resident_bytes()["daemon"]
                    wanted: dict[str, Any] = {
                        "topics": topics,
                        "messages": topics * each,
                        "pattern": pattern,
                        "queue": queue,
                    }
                    taker = await Process.start(service.url, "take_topics", "t", **wanted)
                    subscribed = await taker.line()
                    measured = Measured([service])
                    taker.go_on()
                    result = await taker.result()
                    cpu = measured.result()["cpu_s"] | {"client": result["take_cpu_s"]}
                    name = f"{topics:,} topics by {'pattern' if pattern else 'list'}, {how}"
                    self._note(
                        name + (f", queue of {queue:,}" if queue else ""), result["rate"], "msg/s",
                        cpu_us_per_message={role: s * 1e6 / result["messages"] for role, s in cpu.items()},
                        subscribe_s=subscribed["seconds"],
                        client_mb=[size / 1e6 for size in (
                            subscribed["before_bytes"], subscribed["resident_bytes"], result["resident_bytes"])],
                        daemon_mb=[size / 1e6 for size in (idle, loaded, service.resident_bytes()["daemon"])],
                    )  # fmt: skip


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}" if value < 10 else f"{value:,.0f}"
    if isinstance(value, list):
        return "/".join(map(_shown, value)) if len(value) < 6 else f"{min(value):,}..{max(value):,}"
    return f"{value:,}" if isinstance(value, int) else str(value)


PARTS = {
    "a": Bench.shared,
    "b": Bench.key_shared,
    "c": Bench.failover,
    "d": Bench.topics,
}


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each figure."""
    parser = parser_of("python -m bench subscriptions", __doc__)
    parser.add_argument("--only", default=",".join(PARTS), metavar="a,b,...", help="some of the parts")
    parser.add_argument("--quick", action="store_true", help="a quarter of everything")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="of all parts (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    wanted = [letter.strip() for letter in given.only.split(",")]
    if unknown := [letter for letter in wanted if letter not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    OUT.mkdir(exist_ok=True)
    screen = console()
    directory = OUT / f"scratch-{time.time_ns()}"
    directory.mkdir()
    bench = Bench(directory, lambda text: screen.print(text, soft_wrap=True), quick=given.quick)

    async def run() -> None:
        for _ in range(given.rounds):
            for letter in wanted:
                await PARTS[letter](bench)

    try:
        uvloop.run(run())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        path = given.json or OUT / time.strftime("bench-subscriptions-%Y%m%d-%H%M%S.json")
        path.write_text(json.dumps(bench.found, indent=1))
        screen.print(f"all figures: {path}")
    return 0
