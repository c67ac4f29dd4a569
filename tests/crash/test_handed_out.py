"""Redelivery counts when processes of consumers are killed: rule 49."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from magnetar.client import Client, DeadLetterPolicy, MessageId, ReceiveTimeout, connect
from support.service import Service

pytestmark = [pytest.mark.timeout(120), pytest.mark.real]

MESSAGES = 200
KILLS = 6

# It has all messages in its queue when it takes the first one, which kills it.
CONSUMER = """
import asyncio, os, signal, sys
from magnetar.client import DeadLetterPolicy, connect

async def main():
    async with connect(sys.argv[1]) as client:
        consumer = await client.subscribe(
            "t", "s", type="shared", start="earliest", dead_letter=DeadLetterPolicy(max_redeliver_count=3))
        TAKE
            os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
WAYS = {
    "receive": "if await consumer.receive():",
    "iteration": "async for message in consumer:",
    "uvloop": "if await consumer.receive():",
}


@pytest.mark.parametrize("way", WAYS)
async def test_rule_49_a_message_that_kills_its_process_is_the_only_dead_letter(
    tmp_path: Path, way: str
) -> None:
    program = CONSUMER.replace("TAKE", WAYS[way])
    if way == "uvloop":
        program = program.replace("asyncio.run(main())", "import uvloop; uvloop.run(main())")
    service = Service(tmp_path / "data")
    service.start()
    try:
        async with connect(service.url) as client:
            async with client.create_producer("t") as producer:
                first, *_ = await producer.send_many([b"%d" % number for number in range(MESSAGES)])
            for _ in range(KILLS):
                done = subprocess.run([sys.executable, "-c", program, service.url], timeout=60, check=False)
                assert done.returncode == -signal.SIGKILL
            assert await left_over(client) == MESSAGES - 1
            async with client.create_reader("t-s-DLQ", start="earliest") as reader:
                letter = await reader.receive(10.0)
                assert letter.value == b"0"
                assert MessageId.parse(letter.properties["ORIGIN_MESSAGE_ID"]) == first
                with pytest.raises(ReceiveTimeout):
                    await reader.receive(0.2)
    finally:
        service.stop()


async def left_over(client: Client) -> int:
    """Takes all that is not buried; each has been handed out as often as its count says."""
    policy = DeadLetterPolicy(max_redeliver_count=3)
    counts: list[int] = []
    async with client.subscribe("t", "s", type="shared", start="earliest", dead_letter=policy) as consumer:
        while len(counts) < MESSAGES - 1:
            message = await consumer.receive(30.0)
            counts.append(message.redelivery_count)
            await consumer.ack(message)
    # The killer was handed out four times, the one behind it in the two lives that were left.
    assert sorted(counts) == [0] * (MESSAGES - 2) + [KILLS - 4]
    return len(counts)
