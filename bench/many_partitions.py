"""What partitions and producers cost by their number: a real service on loopback, fsync on, and one client process.

    python -m bench many_partitions [--topics 1000] [--partitions 10] [--producers 10000]

(1) So many partitioned topics are made, listed, and get a producer each, which opens all partitions.
(2) One topic gets as many partitions as all of these together.
(3) One topic gets so many producers.
(4) The service is started again with all of that.

Times in seconds; memory of the service's processes and of the client, in MB, after each step.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvloop

from bench.arguments import OUT, console
from bench.service_process import ServiceProcess, resident_bytes
from magnetar.client import connect

AT_ONCE = 50
T = TypeVar("T")


async def each(names: Iterable[str], call: Callable[[str], Awaitable[T]]) -> list[T]:
    """AT_ONCE at a time."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(name: str) -> T:
        async with slots:
            return await call(name)

    return await asyncio.gather(*[one(name) for name in names])


class Steps:
    """Prints what each took."""

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service
        self._print = console().print

    @asynccontextmanager
    async def step(self, name: str) -> AsyncIterator[None]:
        """One of them."""
        begun = time.monotonic()
        yield
        self.took(name, time.monotonic() - begun)

    def took(self, name: str, seconds: float) -> None:
        """One of them, that was measured otherwise."""
        sizes = [*self._service.resident_bytes().items(), ("client", resident_bytes(os.getpid()))]
        memory = "  ".join(f"{role} {size / 1e6:.0f}" for role, size in sizes)
        self._print(f"{name:55} {seconds:8.2f} s   {memory} MB")


async def _work(service: ServiceProcess, given: argparse.Namespace) -> None:
    steps = Steps(service)
    count, all_of_them = given.topics, given.topics * given.partitions
    names = [f"topic-{number}" for number in range(count)]
    async with connect(service.url, operation_timeout=120.0) as client:
        admin: Any = client.admin
        async with steps.step("connected"):
            await admin.partitions("any")
        async with steps.step(f"{count} topics with {given.partitions} partitions made"):
            await each(names, lambda name: admin.create_topic(name, partitions=given.partitions))
        async with steps.step("listed"):
            assert len(await admin.list_topics()) == all_of_them
        async with steps.step("a producer for each topic"):
            producers = await each(names, client.create_producer)
        async with steps.step("a message from each"):
            await asyncio.gather(*[producer.send(b"x") for producer in producers])
        async with steps.step("producers closed"):
            await asyncio.gather(*[producer.close() for producer in producers])
        async with steps.step(f"one topic with {all_of_them} partitions made"):
            await admin.create_topic("large", partitions=all_of_them)
        async with steps.step("its figures"):
            assert len((await admin.topic_stats("large"))["partitions"]) == all_of_them
        async with steps.step("deleted"):
            await admin.delete_topic("large")
        async with steps.step(f"one topic with {given.producers} producers"):
            await each(["one"] * given.producers, client.create_producer)


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each step."""
    parser = argparse.ArgumentParser(prog="python -m bench many_partitions", description=__doc__)
    parser.add_argument("--topics", type=int, default=1_000)
    parser.add_argument("--partitions", type=int, default=10)
    parser.add_argument("--producers", type=int, default=10_000)
    given = parser.parse_args(arguments)
    data = OUT / f"partitions-{time.time_ns()}"
    service = ServiceProcess(data)
    try:
        with service:
            Steps(service).took("started", service.ready_after_s)
            uvloop.run(_work(service, given))
        with service:
            Steps(service).took("started again", service.ready_after_s)
    finally:
        shutil.rmtree(data, ignore_errors=True)
    return 0
