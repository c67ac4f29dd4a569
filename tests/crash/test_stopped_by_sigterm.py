"""Programs that end at SIGTERM as docs/client.md says: nothing that they dealt with comes again, nothing is left out."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from magnetar.client import connect
from support.service import Service

pytestmark = [pytest.mark.timeout(120), pytest.mark.real]

MESSAGES = 1_000
ROUNDS = 2

ASYNCIO = """
import asyncio, signal, sys
from magnetar.client import connect

async def main():
    async with connect(sys.argv[1]) as client, client.subscribe("t", "s", start="earliest") as consumer:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)
        async for message in consumer:
            print(message.value.decode(), flush=True)
            await asyncio.sleep(0.001)
            await consumer.ack(message)

asyncio.run(main())
"""
BLOCKING = """
import signal, sys, time
from magnetar.client.blocking import connect

with connect(sys.argv[1]) as client, client.subscribe("t", "s", start="earliest") as consumer:
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    for message in consumer:
        print(message.value.decode(), flush=True)
        time.sleep(0.001)
        consumer.ack(message)
"""
PROGRAMS = {
    "asyncio": ASYNCIO,
    "uvloop": ASYNCIO.replace("asyncio.run(main())", "import uvloop; uvloop.run(main())"),
    "blocking": BLOCKING,
}


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_program_that_gets_sigterm_has_dealt_with_each_message_once(
    tmp_path: Path, program: str
) -> None:
    service = Service(tmp_path / "data")
    service.start()
    try:
        async with connect(service.url) as client, client.create_producer("t") as producer:
            await producer.send_many([b"%d" % number for number in range(MESSAGES)])
            dealt_with: list[str] = []
            for count in range(1, ROUNDS + 1):
                dealt_with += await asyncio.to_thread(
                    run_until_sigterm, [sys.executable, "-c", PROGRAMS[program], service.url], 40 * count
                )
            async with client.subscribe("t", "s") as consumer:
                left = [(await consumer.receive(10.0)).value for _ in range(MESSAGES - len(dealt_with))]
            assert dealt_with + [value.decode() for value in left if value] == [
                str(number) for number in range(MESSAGES)
            ]
            assert len(dealt_with) < MESSAGES, "each was stopped on its way"
    finally:
        service.stop()


def run_until_sigterm(command: list[str], lines: int) -> list[str]:
    """What it prints until it has ended by itself; SIGTERM comes after so many lines, in the midst of its work."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = [process.stdout.readline().strip() for _ in range(lines)]
        process.send_signal(signal.SIGTERM)
        printed += process.stdout.read().split()
        assert process.wait(timeout=60) == 0
    return printed
