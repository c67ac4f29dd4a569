"""Each job as a person runs it: the command against a real service, its output, its exit code, and Ctrl-C.

A process of its own with a Spark of its own takes 15 s of CPU time. `make test` starts one for each thing that only such a
process shows, and runs the other commands on the session that all tests share; `make spark` starts one for each.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from magnetar.cli.app import app
from magnetar.cli.commands import spark_run
from magnetar.cli.terminal.session import fail
from magnetar.ledger import LedgerSettings, StaticBookies, TcpTransport
from magnetar.proto.commands import TopicLedgers
from magnetar.runtime.connection import ConnectionOptions
from magnetar.spark import program
from support.long_form import LONG
from support.service import Service
from support.spark_command import QUICK, Ended, SparkCommand
from support.spark_topics import Topics, full

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180), pytest.mark.real]

MINUTE_MS = 60_000
START_MS = 1_700_000_000_000 // MINUTE_MS * MINUTE_MS
Start = Callable[..., SparkCommand]
Run = Callable[..., Ended]


@pytest.fixture
def start(url: str) -> Iterator[Start]:
    """start("compact", "orders", ...): on the module's service."""
    started: list[SparkCommand] = []

    def call(*arguments: str, **environment: str) -> SparkCommand:
        command = SparkCommand(*arguments, "--url", url, *QUICK, **environment)
        started.append(command)
        return command

    yield call
    for command in started:
        if command.running:
            command.kill()


@pytest.fixture
def run(start: Start, spark: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """run("compact", "orders", ...) to its end; in the short form inside this process, on the session of all tests."""

    def shared(order: program.Order, say: program.Say) -> Any:
        last = json.loads(json.dumps(program.perform(spark, order, say)))
        return last["report"] if "report" in last else fail(spark_run.as_flags(last["error"]))

    def call(*arguments: str) -> Ended:
        if LONG:
            return start(*arguments).end()
        with monkeypatch.context() as patched:
            patched.setattr(spark_run, "run_program", shared)
            ended = CliRunner().invoke(app, ["spark", *arguments, "--url", url])
        return Ended(ended.exit_code, ended.stdout, ended.stderr)

    return call


@pytest.fixture(scope="module")
def topics(service: Service) -> Topics:
    return Topics(service)


def succeeded(ended: Ended) -> Ended:
    assert (ended.code, ended.err) == (0, ""), ended
    return ended


def messages(count: int) -> list[tuple[Any, ...]]:
    return [
        (
            f"k{i % 5}",
            None if i % 7 == 0 else b"%d" % i,
            {"event_time": START_MS + i * 1000, "properties": {"n": str(i)}},
        )
        for i in range(count)
    ]


def last_of_keys(count: int) -> list[tuple[bytes, bytes]]:
    last = {key: value for key, value, _ in messages(count)}
    order = {key: i for i, (key, _, _) in enumerate(messages(count))}
    return [(key.encode(), last[key]) for key in sorted(last, key=order.__getitem__) if last[key] is not None]


def table(out: str) -> dict[str, str]:
    """Rows of two columns between the lines of a table."""
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in out.splitlines()
        if line.startswith("│")
    ]
    return {row[0]: row[1] for row in cells if len(row) == 2}


@pytest.mark.spark
def test_compact_into_a_topic_and_as_parquet(
    start: Start, run: Run, topics: Topics, produce: Callable[..., None], tmp_path: Path
) -> None:
    produce("c-orders", messages(100), flush_every=4)
    path = tmp_path / "out" / "compacted"
    path.parent.mkdir()
    to_topic = start("compact", "c-orders", "--to-topic", "c-compacted")
    to_parquet = run("compact", "c-orders", "--to-parquet", str(path), "--json")

    expected = last_of_keys(100)
    ended = succeeded(to_topic.end())
    assert ended.out.splitlines()[0] == f"compacted {full('c-orders')} into {full('c-compacted')}"
    figures = table(ended.out)
    assert (figures["messages read"], figures["messages kept"]) == ("100", str(len(expected)))
    assert float(figures["seconds"]) > 0
    assert [(row.key, row.value) for row in topics.rows("c-compacted")] == expected

    result = succeeded(to_parquet).json
    assert (result["target"], result["messages_kept"]) == (str(path), len(expected))
    stored = pq.read_table(path).sort_by("offset").to_pydict()
    assert list(zip(stored["key"], stored["value"], strict=True)) == expected

    # Again: the target has messages. Spark is not even started: with this Java it could not be.
    again = start("compact", "c-orders", "--to-topic", "c-compacted", JAVA_HOME="/nowhere").end()
    assert again.code == 2
    (line,) = again.err.splitlines()
    assert "--to-topic" in line
    assert line.endswith("name a new one, or delete it first: magnetar topics delete c-compacted")


@pytest.mark.spark
def test_archive_and_back_and_a_range_of_the_topic_marked(
    run: Run, topics: Topics, produce: Callable[..., None], tmp_path: Path
) -> None:
    produce("a-orders", messages(200), flush_every=4)
    path = str(tmp_path / "archive")
    archived = succeeded(run("archive", "a-orders", "--path", path, "--json")).json
    rows = sum(manifest["rows"] for manifest in archived["archived"])
    assert 100 < rows < 200
    assert archived["archived_before"] == 0
    replayed = succeeded(run("replay", "--to-topic", "a-again", "--archive", path, "--json")).json
    assert (replayed["messages"], replayed["sources"]) == (rows, [full("a-orders")])
    source = topics.rows("a-orders")

    def as_tuple(row: Any) -> tuple[Any, ...]:
        return row.key, row.value, row.properties, row.event_time

    assert [as_tuple(row) for row in topics.rows("a-again")] == [as_tuple(row) for row in source[:rows]]
    part = ("--from-offset", "30", "--before-offset", "90", "--mark")
    ended = succeeded(run("replay", "a-orders", "--to-topic", "a-marked", *part))
    assert table(ended.out)["messages"] == "60"
    assert [as_tuple(row) for row in topics.rows("a-marked")] == [
        (
            row.key,
            row.value,
            {
                **(row.properties or {}),
                "magnetar.replay.topic": row.topic,
                "magnetar.replay.offset": str(row.offset),
            },
            row.event_time,
        )
        for row in source[30:90]
    ]


@pytest.mark.spark
def test_an_audit_that_finds_something_ends_with_1(
    run: Run, service: Service, topics: Topics, produce: Callable[..., None]
) -> None:
    produce("d-orders", messages(100), flush_every=4)
    listed = topics.request(TopicLedgers(0, full("d-orders")), "d-orders")
    lost, sound = listed["ledgers"][:2]
    (bookie,) = listed["bookies"]

    async def lose() -> None:
        directory = StaticBookies({bookie: ("127.0.0.1", service.bookie_port)})
        transport = TcpTransport(directory, LedgerSettings(), ConnectionOptions("test"))
        try:
            await transport.delete_ledger(bookie, lost[1])
        finally:
            await transport.close()

    asyncio.run(lose())
    ended = run("audit", "d-orders", "--json")
    assert (ended.code, ended.err) == (1, "")
    result = ended.json
    (row,) = result["rows"]
    assert (row["ledger"], row["first_entry"], row["last_entry"]) == (lost[0], 0, lost[3] - 1)
    assert (row["bookie"], row["state"]) == (bookie, "missing")
    assert result["states"]["missing"] == lost[3]
    assert result["states"]["ok"] >= sound[3]
    assert (result["clean"], result["differences"], result["queued"]) == (False, 1, 1)


def event_times(minutes: range) -> list[tuple[Any, ...]]:
    return [
        (f"k{i % 3}", b"x" * i, {"event_time": START_MS + minute * MINUTE_MS + i * 5000})
        for minute in minutes
        for i in range(10)
    ]


@pytest.mark.spark
def test_a_rollup_that_is_interrupted_goes_on_from_its_checkpoint(
    start: Start, run: Run, topics: Topics, produce: Callable[..., None], tmp_path: Path
) -> None:
    produce("r-orders", event_times(range(4)))
    checkpoint = tmp_path / "checkpoint"
    options = ("--to-topic", "r-figures", "--checkpoint", str(checkpoint), "--watermark", "1 minute")
    running = start("rollup", "r-orders", *options)
    topics.wait_for(
        lambda: (checkpoint / "commits" / "0").exists() or not running.running, "a batch is committed"
    )
    running.send(signal.SIGINT)
    ended = running.end()
    assert (ended.code, ended.out, ended.err) == (130, "", "")

    produce("r-orders", event_times(range(4, 8)))
    result = succeeded(run("rollup", "r-orders", *options, "--once", "--json")).json
    assert result["target"] == "r-figures"
    figures = [json.loads(row.value or b"") for row in topics.rows("r-figures")]
    windows = Counter((row["window_start"], row["key"]) for row in figures)
    assert set(windows.values()) == {1}
    # All windows but those that the watermark has not passed.
    assert len({start for start, _ in windows}) in (6, 7)
    assert all(row["messages"] in (3, 4) for row in figures)


@pytest.mark.spark
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_command_that_is_ended_while_spark_starts_leaves_no_process(
    start: Start, produce: Callable[..., None], tmp_path: Path, number: int, code: int
) -> None:
    produce("s-orders", messages(10))
    command = start("compact", "s-orders", "--to-topic", "s-compacted", TMPDIR=str(tmp_path))
    command.wait_for("org.apache.spark.deploy.SparkSubmit")
    command.send(number)
    ended = command.end(60)
    assert (ended.code, ended.out, ended.err) == (code, "", "")
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def test_without_java_there_is_one_line_with_the_cure(start: Start, produce: Callable[..., None]) -> None:
    produce("j-orders", messages(10))
    ended = start("compact", "j-orders", "--to-topic", "j-compacted", JAVA_HOME="/nowhere").end()
    assert (ended.code, ended.out) == (1, "")
    (line,) = ended.err.splitlines()
    assert line.startswith(
        "magnetar: Spark needs Java, and there is none at /nowhere/bin/java: install Java 17"
    )


def wrong_arguments(url: str, folder: Path) -> list[tuple[list[str], int, str]]:
    """Of commands, the exit code and what their one line says."""
    file = folder / "file"
    file.write_text("x")
    at = ["--url", url]
    compact, replay = ["compact", "w-orders", *at], ["replay", "w-orders", "--to-topic", "w-x", *at]
    rollup = ["rollup", "w-orders", *at, "--to-topic", "w-x", "--checkpoint", str(folder / "c")]
    dead = "magnetar://127.0.0.1:9"
    return [
        (
            ["audit", "w-orders", "--url", dead],
            1,
            "cannot connect to 127.0.0.1:9: .*is the service running there",
        ),
        (["audit", "w-orders", "--url", "localhost"], 2, "--url is 'localhost'; want magnetar://host:port"),
        (["audit", "w-gone", *at], 1, "topic .*w-gone does not exist"),
        (["audit", "a//b", *at], 2, "TOPIC: not a topic name: 'a//b'"),
        (["audit", "w-orders", *at, "--to-parquet", str(folder)], 2, "--to-parquet .* is there already"),
        (["audit", "w-orders", *at, "--conf", "memory"], 2, "--conf is 'memory'; want NAME=VALUE"),
        (compact, 2, "either --to-topic or --to-parquet says where"),
        ([*compact, "--to-topic", "w-orders"], 2, "--to-topic: topic .* cannot be compacted into itself"),
        ([*compact, "--to-topic", "w-x", "--compression", "zip"], 2, "--compression is 'zip'; want one of"),
        (
            [*compact, "--to-parquet", str(file / "x")],
            2,
            "--to-parquet .*file is no folder; name another path",
        ),
        (["archive", "w-orders", *at, "--path", str(file)], 2, "--path .*file is no folder"),
        (
            [*replay, "--start", "yesterday"],
            2,
            "--start: not a position: 'yesterday' .want earliest, latest, a message id",
        ),
        ([*replay, "--end", "earliest"], 2, "--end is 'earliest', before which there is nothing"),
        ([*replay, "--from-offset", "5", "--before-offset", "5"], 2, "--from-offset 5 and --before-offset 5"),
        ([*replay, "--archive", str(folder / "no")], 2, "--archive: there is no archive at"),
        (
            ["replay", "w-orders", "--to-topic", "w-orders", *at],
            2,
            "--to-topic: .* cannot be replayed into itself",
        ),
        ([*rollup, "--window", "a while"], 2, "--window is 'a while'; want a length of time"),
        ([*rollup, "--start", "12:00"], 2, "--start: not a position: '12:00'"),
        (
            ["rollup", "w-orders", *at, "--to-topic", "w-orders", "--checkpoint", "c"],
            2,
            "--to-topic: .*its own figures",
        ),
        (
            ["rollup", "w-orders", *at, "--to-topic", "w-x", "--checkpoint", str(file)],
            2,
            "--checkpoint .*is no folder",
        ),
    ]


def test_wrong_arguments_are_refused_before_spark_starts(
    url: str, topics: Topics, produce: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce("w-orders", messages(10))
    monkeypatch.setenv("JAVA_HOME", "/nowhere")  # what gets as far as that says so
    for arguments, code, message in wrong_arguments(url, tmp_path):
        ended = CliRunner().invoke(app, ["spark", *arguments])
        lines = ended.stderr.splitlines()
        assert len(lines) == 1, (arguments, ended.stderr)
        assert ended.exit_code == code, (arguments, lines)
        assert re.search(message, lines[0]), (arguments, lines[0])
    assert topics.ask(lambda client: client.admin.list_topics()).count(full("w-x")) == 0
