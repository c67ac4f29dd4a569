"""How a command ends, and what it refuses before it begins."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from magnetar.cli.app import app
from magnetar.cli.terminal.session import run
from magnetar.client import connect
from magnetar.proto.commands import Subscribe
from magnetar.proto.errors import (
    InvalidArgument,
    InvalidSetting,
    InvalidTopicName,
    MagnetarError,
    MessageTooLarge,
    SendTimeout,
    ServiceNotReady,
    TopicNotFound,
)
from support.client_kit import until
from support.fake_broker import FakeBroker


def test_a_warning_that_comes_again_and_again_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    async def command() -> None:
        for text in ("985 messages failed", "15 messages failed") * 3:
            logging.getLogger("magnetar.client").warning(text)

    run(command(), warnings=True)
    assert capsys.readouterr().err.splitlines() == [
        "magnetar: 985 messages failed",
        "magnetar: 15 messages failed",
    ]


def test_one_line_for_one_failure(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def command() -> None:
        logging.getLogger("magnetar.client").warning("1 messages to t failed")
        raise SendTimeout("the message could not be sent")

    with pytest.raises(SystemExit) as ended:
        run(command())
    assert ended.value.code == 1
    assert capsys.readouterr().err == "magnetar: the message could not be sent\n"
    assert not caplog.records
    logging.getLogger("magnetar.client").setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("produce t --file f -m x", "--file and -m exclude each other"),
        ("produce t --payload f -m x", "-m and --payload exclude each other"),
        ("produce t -m x --key a --key-field b", "--key and --key-field exclude each other"),
        ("produce t --payload f --key-field b", "--payload and --key-field exclude each other"),
        ("produce t -m x --compression brotli", "--compression: unknown compression 'brotli' (one of none, lz4, zstd,"),
        ("produce t -m x --event-time noon", "--event-time: not a time: 'noon' (want 2026-01-31T12:00:00 in local time"),
        ("produce t -m x --property a", "--property is 'a'; want NAME=VALUE"),
        ("produce t -m x --property a=\udcff", r"--property: its bytes are not UTF-8: b'a=\xff'"),
        ("produce t -m x --key \udcff", r"--key: its bytes are not UTF-8: b'\xff'"),
        ("consume t -s s --start noon", "--start: not a position: 'noon' (want earliest, latest, a message id"),
        ("tail t --start noon", "--start: not a position: 'noon'"),
        ("perf consume t --start noon", "--start: not a position: 'noon'"),
        ("perf tail t --start noon", "--start: not a position: 'noon'"),
        ("consume t -s s --json --format line", "--format and --json exclude each other"),
        ("tail t --json --format line", "--format and --json exclude each other"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line_and_nothing_connects(line: str, told: str) -> None:
    ended = CliRunner().invoke(app, [*line.split(), "--url", "magnetar://127.0.0.1:1"])
    assert ended.exit_code == 2
    [error] = ended.stderr.splitlines()
    assert error.startswith(f"magnetar: {told}")


@pytest.mark.parametrize(
    "line",
    [
        "tail t --url nowhere://127.0.0.1",
        "cluster rolling-restart --metadata zk://127.0.0.1:1/x",
        "cluster recover-ledger 1",
        "bookie read 1 9-7 --data /nowhere",
        "topics stats",
        "no-such-command",
    ],
)
def test_a_wrong_command_line_has_one_exit_code(line: str) -> None:
    ended = CliRunner().invoke(app, line.split())
    assert ended.exit_code == 2, ended.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgument, 2),
        (InvalidTopicName, 2),
        (InvalidSetting, 78),
        (MessageTooLarge, 1),
        (TopicNotFound, 1),
        (SendTimeout, 1),
    ],
)
def test_the_exit_code_says_whether_the_same_again_may_help(error: type[MagnetarError], code: int) -> None:
    async def command() -> None:
        raise error("no")

    with pytest.raises(SystemExit) as ended:
        run(command())
    assert ended.value.code == code


def test_inputs_are_looked_at_before_anything_connects(tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(bytes((5 << 20) + 1))
    for option, path, told in (
        ("--payload", large, "the payload has more than 5242880 bytes"),
        ("--payload", tmp_path, "it is a directory"),
        ("--file", tmp_path, "it is a directory"),
        ("--payload", tmp_path / "none", f"cannot read {tmp_path / 'none'}: No such file or directory"),
        ("--file", tmp_path / "none", f"cannot read {tmp_path / 'none'}: No such file or directory"),
    ):
        ended = CliRunner().invoke(
            app, ["produce", "t", option, str(path), "--url", "magnetar://127.0.0.1:1"]
        )
        assert ended.exit_code == 1
        assert told in ended.stderr
        assert len(ended.stderr.splitlines()) == 1


def test_a_command_leaves_the_log_of_the_client_as_it_was() -> None:
    client_log = logging.getLogger("magnetar.client")
    levels = [client_log.level]

    async def command() -> None:
        levels.append(client_log.level)

    run(command())
    assert levels == [client_log.level, logging.ERROR]


async def beside(line: str, url: str) -> Result:
    """The command, in a thread and a loop of its own: the test's loop has the broker."""
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, [*line.split(), "--url", url]))


@pytest.mark.parametrize("line", ["consume t -s s -n 1", "tail t -n 1"])
async def test_rule_45_a_command_that_waits_for_a_broker_says_so(
    line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    impatient = partial(connect, operation_timeout=0.2, backoff_max=0.2)
    monkeypatch.setattr("magnetar.client.connect", impatient)
    broker = await FakeBroker.start()
    command = asyncio.ensure_future(beside(line, broker.url))
    await until(lambda: broker.received(Subscribe))
    port = broker.port
    await broker.close()
    await until(lambda: "has waited" in caplog.text)
    await broker.listen(port)
    await until(lambda: len(broker.received(Subscribe)) > 1)
    async with connect(broker.url) as client, client.create_producer("t") as producer:
        await producer.send(b"0")
    ended = await command
    await broker.close()
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout == "0\n"
    assert "has waited 0.2 s for a broker that serves it, and goes on waiting: " in ended.stderr
    assert all(told.startswith("magnetar: ") for told in ended.stderr.splitlines())


async def test_rule_45_a_command_that_sends_says_that_its_connection_was_lost() -> None:
    broker = await FakeBroker.start()
    broker.hold_receipts = True
    command = asyncio.ensure_future(beside("produce t -m 0", broker.url))
    await until(lambda: broker.held)
    broker.hold_receipts = False
    broker.cut()
    ended = await command
    await broker.close()
    assert ended.exit_code == 0, ended.stderr
    assert "what used it attaches again" in ended.stderr


def test_a_reason_that_was_a_warning_is_not_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    async def command() -> None:
        logging.getLogger("magnetar.client").warning("2 messages to t failed: the topic is fenced")
        raise SendTimeout("the topic is fenced")

    with pytest.raises(SystemExit) as ended:
        run(command(), warnings=True)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "magnetar: 2 messages to t failed: the topic is fenced\n"


def test_a_command_says_at_once_that_it_waits_for_the_metadata_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_slowly(*_: Any, **__: Any) -> None:
        await asyncio.sleep(0.7)
        raise ServiceNotReady("no server can be used")

    monkeypatch.setattr("magnetar.metadata.zookeeper.store.open_zookeeper_store", open_slowly)
    ended = CliRunner().invoke(app, ["cluster", "check", "--metadata", "zk://me:secret@zk1:2181/x"])
    assert ended.exit_code == 1
    waits, failed = ended.stderr.splitlines()
    assert waits == "magnetar: waiting for the metadata store at zk1:2181/x"
    assert failed == "magnetar: no server can be used"
