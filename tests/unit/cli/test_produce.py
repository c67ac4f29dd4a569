"""`magnetar produce`: what becomes of lines: keys, sequence ids, delivery times, partitions; and what is said about it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner, Result

from magnetar.cli.app import app
from magnetar.proto.batch import decode_batch
from magnetar.proto.batch_extensions import EXT_DELIVER_AT_MS
from magnetar.proto.commands import CreateProducer
from support.fake_broker import FakeBroker


@pytest_asyncio.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    broker = await FakeBroker.start()
    broker.deduplicates = True
    yield broker
    await broker.close()


async def produce(broker: FakeBroker, *arguments: str) -> Result:
    """The command, in a thread and a loop of its own: the test's loop has the broker."""
    line = ["produce", *arguments, "--url", broker.url]
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, line))


async def produced(broker: FakeBroker, *arguments: str) -> Any:
    ended = await produce(broker, *arguments, "--json")
    assert ended.exit_code == 0, ended.stderr
    return json.loads(ended.stdout)


def stored(broker: FakeBroker, topic: str = "t") -> list[tuple[Any, Any, Any, Any]]:
    """Of each message: value, key, sequence id of its batch, delivery time."""
    found = []
    for entry in broker.topic(topic).entries:
        for position in range(entry.batch_count):
            batch = decode_batch(entry.batch(position))
            due, first = batch.extensions.get(EXT_DELIVER_AT_MS), batch.header.sequence_id
            keys = batch.keys or [None] * batch.header.message_count
            found += [(value, key, first, due) for value, key in zip(batch.values, keys)]
    return found


async def test_a_file_that_is_sent_again_stores_nothing_twice(broker: FakeBroker, tmp_path: Path) -> None:
    path = tmp_path / "flights.jsonl"
    lines = [json.dumps({"n": 3 * n, "carrier": "AA" if n % 2 else "UA"}) for n in range(40)]
    path.write_text("\n".join(lines[:25]))
    options = (
        "t",
        "--file",
        str(path),
        "--sequence-field",
        "n",
        "--name",
        "flights",
        "--key-field",
        "carrier",
    )
    first = await produced(broker, *options)
    assert (first["messages"], first["duplicates"]) == (25, 0)
    path.write_text("\n".join(lines))
    ended = await produce(broker, *options)
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.startswith("stored 15 messages in t (last id ")
    assert ended.stdout.endswith("; 25 messages stored before\n")
    again = await produced(broker, *options)
    assert (again["messages"], again["duplicates"], again["last_id"]) == (0, 40, None)
    assert [value.decode() for value, *_ in stored(broker)] == lines
    assert {key for _, key, *_ in stored(broker)} == {"AA", "UA"}
    assert not ended.stderr
    broker.deduplicates = False
    told = await produce(broker, *options)
    assert told.stderr.startswith(
        "magnetar: t has no deduplication: what is sent again is stored again; magnetar"
    )


async def test_lines_say_when_they_are_due(broker: FakeBroker, tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(
        '{"at": "2026-01-31T12:00:00Z"}\n{"at": 1769860801234}\n{"at": null}\n{"at": "2026-01-31T14:00:02+02:00"}\n'
    )
    assert (await produced(broker, "t", "-f", str(path), "--deliver-at-field", "at"))["messages"] == 4
    noon = 1769860800000
    assert [due for *_, due in stored(broker)] == [noon, noon + 1240, None, noon + 2000]
    await produced(broker, "u", "-m", "x", "-m", "y", "--deliver-at", "2026-01-31T12:00:00Z")
    assert [due for *_, due in stored(broker, "u")] == [noon, noon]
    before = time.time() * 1000
    await produced(broker, "v", "-m", "x", "--deliver-after", "2h")
    assert 0 <= stored(broker, "v")[0][3] - before - 7_200_000 < 60_000


async def test_a_partition_a_name_and_an_access_mode_can_be_chosen(broker: FakeBroker) -> None:
    broker.partitions["persistent://public/default/t"] = 4
    wrong = await produce(broker, "t", "-m", "x", "--partition", "4")
    assert (wrong.exit_code, wrong.stderr) == (
        1,
        "magnetar: persistent://public/default/t has no partition 4\n",
    )
    twice = await produce(broker, "t-partition-2", "-m", "x", "--partition", "2")
    assert (twice.exit_code, "leave out --partition" in twice.stderr) == (2, True)
    chosen = ("--partition", "3", "--name", "n", "--access-mode", "exclusive")
    answer = await produced(broker, "t", "-m", "x", *chosen)
    assert answer["topic"] == "persistent://public/default/t-partition-3"
    *_, opening = broker.received(CreateProducer)
    assert opening.topic == "persistent://public/default/t-partition-3"
    assert (opening.name, opening.access_mode) == ("n", "exclusive")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            '{"n": 7}',
            "line 2: the sequence id 7 follows 7, which this producer has sent already; they must rise",
        ),
        ('{"n": 6}', "line 2: the sequence id 6 follows 7"),
        ('{"n": -1}', "line 2: its field 'n': not a sequence id: -1"),
        ('{"n": "8"}', "line 2: its field 'n': not a sequence id: '8'"),
        (
            '{"m": 8}',
            "line 2: it is no JSON object with a field 'n'; leave out --sequence-field, or correct it",
        ),
        ("8", "line 2: it is no JSON object with a field 'n'"),
        ("n", "line 2: it is no JSON object with a field 'n'"),
    ],
)
async def test_a_line_without_a_sequence_id_that_rises_is_told(
    broker: FakeBroker, tmp_path: Path, line: str, text: str
) -> None:
    path = tmp_path / "lines"
    path.write_text(f'{{"n": 7}}\n{line}\n{{"n": 9}}\n')
    ended = await produce(broker, "t", "-f", str(path), "--sequence-field", "n", "--name", "p")
    assert ended.exit_code == 1
    assert ended.stderr.startswith(f"magnetar: {text}")
    assert "(messages stored before it: 1)" in ended.stderr
    assert [first for *_, first, _ in stored(broker)] == [7]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("-m x --sequence-field n", "--sequence-field needs --name: what is stored already is known by"),
        ("--payload f --sequence-field n --name p", "--payload and --sequence-field exclude each other"),
        ("--payload f --deliver-at-field n", "--payload and --deliver-at-field exclude each other"),
        (
            "-m x --deliver-at 2026-01-31 --deliver-after 1h",
            "--deliver-at and --deliver-after exclude each other",
        ),
        (
            "-m x --deliver-after 1h --deliver-at-field k",
            "--deliver-after and --deliver-at-field exclude each",
        ),
        ("-m x --deliver-at noon", "--deliver-at: not a time: 'noon'"),
        ("-m x --deliver-after 5", "--deliver-after is '5'; want a number with a unit, as 90s, 2h or 7d"),
        ("-m x --access-mode mine", "--access-mode: unknown access_mode 'mine'"),
    ],
)
def test_a_wrong_command_line_is_one_line(line: str, text: str) -> None:
    ended = CliRunner().invoke(app, ["produce", "t", *line.split(), "--url", "magnetar://127.0.0.1:1"])
    assert ended.exit_code == 2
    assert ended.stderr.startswith(f"magnetar: {text}"), ended.stderr
    assert len(ended.stderr.splitlines()) == 1
