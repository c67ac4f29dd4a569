"""`magnetar bookie SUBCOMMAND` on a bookie that runs: asked over HTTP, found by its data directory or its address."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.client.blocking import connect
from magnetar.runtime.files import OsFiles
from support.bookie_commands import Run, documented
from support.service import Service, held_port

pytestmark = pytest.mark.real


READING = ("info", "cookie", "journal dump", "verify")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """It runs, and has stored three messages."""
    service = Service(tmp_path_factory.mktemp("service") / "data")
    service.start()
    try:
        with connect(service.url) as client, client.create_producer("orders") as producer:
            for value in (b"first", b"second", b"third"):
                producer.send(value, key="k")
        yield service
    finally:
        service.stop()


def address(service: Service) -> str:
    return f"127.0.0.1:{service.http_port}"


def messages(*where: str | Path) -> list[str]:
    """What `read --messages` shows of all ledgers."""
    ledgers = [row["ledger_id"] for row in Run("ledgers", "--json", *where).lines if row["ranges"]]
    found: list[str] = []
    for ledger in ledgers:
        for line in Run("read", ledger, "--messages", "--json", *where).lines:
            found += [message["value"] for message in line["content"].get("messages", ())]
    return found


def health(service: Service) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{address(service)}/health", timeout=10) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


@pytest.mark.parametrize("by", ["--data", "--bookie"])
def test_a_running_bookie_is_asked(service: Service, by: str) -> None:
    where = (by, str(service.data) if by == "--data" else address(service))
    info = Run("info", "--json", *where).lines[0]
    assert (info["running"], info["problem"], info["read_only"]) == (True, "", False)
    assert info["data_directory"] == str(service.data / "bookie")
    assert messages(*where) == ["first", "second", "third"]
    for command in (*READING, "ledgers"):
        table = Run(*command.split(), *where)
        assert table.code == 0, (command, table.out, table.errors)
        assert table.out
    assert Run("cookie", "--check", *where).code == 0
    kinds = {line["kind"] for line in Run("journal", "dump", "--json", *where).lines}
    assert {"journal", "file", "record"} <= kinds
    refused = Run("read", "987654", *where)
    assert (refused.code, "987654" in refused.complaint) == (1, True)


def test_ledgers_and_entries_for_people(service: Service, tmp_path: Path) -> None:
    where = ("--data", service.data)
    table = Run("ledgers", *where)
    assert "last entry" in table.out
    assert table.out.rstrip().endswith(" ledgers") or table.out.rstrip().endswith(" ledger")
    ledgers = [row["ledger_id"] for row in Run("ledgers", "--json", *where).lines if row["ranges"]]
    shown = "".join(Run("read", ledger, "--messages", *where).out for ledger in ledgers)
    assert "third" in shown
    assert "digest good" in shown
    assert "last add confirmed" in Run("ledgers", "--ledger", ledgers[0], *where).out
    for ledger in ledgers:
        raw = tmp_path / "raw"
        text = Run("read", ledger, "--raw", raw, "--json", *where)
        assert raw.stat().st_size == sum(line["payload_bytes"] for line in text.lines)
        lines = Run("read", ledger, "--hex", "--json", *where).lines
        assert b"".join(bytes.fromhex(line["payload_hex"]) for line in lines) == raw.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["9-3"], "not a range of entries: '9-3'"),
        (["x"], "not a range of entries: 'x'"),
        (["--hex", "--messages"], "exclude each other"),
    ],
)
def test_wrong_ranges_and_forms_are_one_clear_line(
    service: Service, arguments: list[str], complaint: str
) -> None:
    refused = Run("read", "1", *arguments, "--data", service.data)
    assert (refused.code, complaint in refused.complaint) == (2, True)


@pytest.mark.parametrize("command", ["ledgers", "read 0"])
def test_the_keys_of_ledgers_and_entries_are_the_documented_ones(service: Service, command: str) -> None:
    lines = Run(*command.split(), "--json", "--data", service.data).lines
    known = documented(command.split()[0])
    assert lines
    for line in lines:
        assert set(line) <= known
        assert known - set(line) <= {"payload", "payload_base64", "payload_hex", "content"}


def test_the_keys_are_those_of_a_stopped_one(service: Service) -> None:
    running = {
        command: Run(*command.split(), "--json", "--data", service.data).lines[0] for command in READING
    }
    service.stop()
    try:
        for command in READING:
            stopped = Run(*command.split(), "--json", "--data", service.data).lines[0]
            assert set(stopped) == set(running[command]), command
        logs = Run("info", "--json", "--data", service.data).lines[0]["entry_logs"]
        assert logs
    finally:
        service.start()
    where = ("--data", service.data)
    ledgers = [row for row in Run("ledgers", "--json", *where).lines if row["logs"]]
    log = f"{ledgers[0]['logs'][0]:08x}"
    lines = Run("entrylog", "dump", log, "--json", *where).lines
    assert [lines[0]["kind"], lines[-1]["kind"]] == ["header", "statistics"]
    assert any(line.get("live") for line in lines if line["kind"] == "record")
    assert Run("entrylog", "dump", log, "--summary", *where).code == 0
    assert "there is no entry log" in Run("entrylog", "dump", "ffffffff", *where).complaint


def test_rule_12_read_only_without_a_stop_survives_a_restart(service: Service) -> None:
    where = ("--data", service.data)
    assert "read_only" not in health(service)["warnings"]
    set_ = Run("convert-to-read-only", "--reason", "its disk makes noises", "--json", *where)
    assert set_.lines[0]["read_only"] is True
    assert health(service)["warnings"]["read_only"] == "its disk makes noises"
    service.stop()
    service.start()
    assert health(service)["warnings"]["read_only"] == "its disk makes noises"
    assert Run("info", "--json", *where).lines[0]["read_only_reason"] == "its disk makes noises"
    undone = Run("convert-to-read-only", "--undo", "--bookie", address(service))
    assert undone.code == 0
    assert "is writable now" in undone.out
    assert "read_only" not in health(service)["warnings"]
    with connect(service.url) as client, client.create_producer("others") as producer:
        producer.send(b"accepted again")


def test_what_changes_more_needs_a_stop(service: Service) -> None:
    for command in (["index", "rebuild", "--yes"], ["cookie", "--lost-directory", "x", "--yes"]):
        assert f"in use by process {service.daemon_pid}" in Run(*command, "--data", service.data).complaint
    refused = Run("cookie", "--lost-directory", "x", "--yes", "--bookie", address(service))
    assert (refused.code, "needs the bookie stopped" in refused.complaint) == (2, True)


def test_a_wrong_address_is_one_clear_line(service: Service) -> None:
    owner = object.__new__(Service)
    closed = f"127.0.0.1:{held_port(owner)}"
    for wrong in (closed, f"127.0.0.1:{service.bookie_port}", "nowhere.invalid:1", "x"):
        failed = Run("info", "--bookie", wrong)
        assert failed.code == 1, wrong
        assert f"no bookie answers at http://{wrong}" in failed.complaint
        assert "--bookie takes the http:// address" in failed.complaint
    both = Run("info", "--bookie", closed, "--data", service.data)
    assert (both.code, "exclude each other" in both.complaint) == (2, True)


def test_a_directory_that_another_process_holds_is_one_clear_line(service: Service, tmp_path: Path) -> None:
    directory = tmp_path / "bookie"
    directory.mkdir()
    (directory / "mark").write_bytes(b"")
    lock = OsFiles().lock(str(directory / "LOCK"))
    try:
        assert "in use by process" in Run("ledgers", "--data", tmp_path).complaint
        # An address that nobody answers at any more, and one that another bookie has now.
        with socket.create_server(("127.0.0.1", 0)) as server:
            gone = f"127.0.0.1:{server.getsockname()[1]}"
        (directory / "http-address").write_text(gone + "\n")
        complaint = Run("ledgers", "--data", tmp_path).complaint
        assert "in use by process" in complaint
        assert f"no bookie answers at http://{gone}" in complaint
        (directory / "http-address").write_text(address(service) + "\n")
        complaint = Run("ledgers", "--data", tmp_path).complaint
        assert "in use by process" in complaint
        assert "answers bookie" in complaint
    finally:
        lock.release()
