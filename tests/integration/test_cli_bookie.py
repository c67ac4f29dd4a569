"""`magnetar bookie SUBCOMMAND` as an operator runs it: on a real service's data, stopped, running, killed and damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.client.blocking import connect
from support.bookie_commands import Run, documented
from support.offline_kit import entry_logs, flip, totals, trace_of, with_stopped
from support.running_copy import copy_running
from support.service import Service

EXIT_CONFIG = 78


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped service that has stored three messages and an acknowledgement; "killed" beside it is how it was before."""
    directory = tmp_path_factory.mktemp("service") / "data"
    service = Service(directory)
    service.start()
    try:
        running_is_not_changed(directory, service.daemon_pid)
        with connect(service.url) as client:
            with client.create_producer("orders") as producer:
                for value in (b"first", b"second", b"third"):
                    producer.send(value, key="k")
            with client.subscribe("orders", "billing", start="earliest") as consumer:
                consumer.ack(consumer.receive(timeout=10), receipt=True)
            copy_running(directory, directory.with_name("killed"))
    finally:
        service.stop()
    return directory


def running_is_not_changed(directory: Path, pid: int) -> None:
    for command in (["cookie", "--lost-directory", "x", "--yes"], ["index", "rebuild", "--yes"]):
        refused = Run(*command, data=directory, as_process=command[0] == "index")
        assert refused.code == 1
        assert f"in use by process {pid}" in refused.complaint
        assert f"kill {pid}" in refused.complaint


@pytest.mark.real
def test_info_verify_and_dumps(data: Path) -> None:
    info = Run("info", "--json", data=data).lines[0]
    assert info["problem"] == ""
    assert info["data_directory"] == str(data / "bookie")
    verified = Run("verify", "--json", data=data)
    assert verified.code == 0
    assert verified.lines[0]["sound"] is True
    assert Run("verify", data=data).out.rstrip().endswith("sound")
    kinds = [line["kind"] for line in Run("journal", "dump", "--json", data=data).lines]
    assert kinds[0] == "journal"
    assert "file" in kinds
    assert "clean end at byte" in Run("journal", "dump", "--summary", data=data).out
    log = entry_logs(data / "bookie")[0]
    dumped = Run("entrylog", "dump", log.name, "--json", data=data)
    assert dumped.code == 0
    assert [dumped.lines[0]["kind"], dumped.lines[-1]["kind"]] == ["header", "statistics"]
    assert "entries that the index has here" in Run("entrylog", "dump", log, "--summary", data=data).out


@pytest.mark.real
@pytest.mark.parametrize(
    "command",
    [
        ["info"],
        ["cookie"],
        ["verify"],
        ["index rebuild", "--dry-run"],
        ["convert-to-read-only", "--undo"],
        ["journal dump"],
        ["entrylog dump", "1"],
    ],
)
def test_the_keys_of_json_are_the_documented_ones(data: Path, command: list[str]) -> None:
    name, *arguments = command
    known = documented(name)
    for line in Run(*name.split(), *arguments, "--json", data=data).lines:
        if line.get("kind") in ("journal", "file", "header", "statistics"):
            continue  # for people who look
        found = set(line)
        for part in ("checks", "findings"):
            for row in line.get(part, []):
                found |= set(row)
        missing = known - found
        if name == "verify":
            missing -= {"position", "ledger_id", "entry_id", "text"}  # of findings, and there are none
        elif line.get("kind") in ("record", "gap"):  # the row has both
            missing = set()
            assert len(found) >= 8
        assert found <= known, command
        assert not missing, command


@pytest.mark.real
def test_looking_leaves_no_trace(data: Path) -> None:
    before = trace_of(data / "bookie")
    log = entry_logs(data / "bookie")[0].name
    for command in (
        ["info"],
        ["journal", "dump"],
        ["entrylog", "dump", log],
        ["verify"],
        ["index", "rebuild", "--dry-run"],
        ["cookie", "--check"],
    ):
        assert Run(*command, data=data).code == 0, command
        assert trace_of(data / "bookie") == before, command


@pytest.mark.real
def test_damage_is_found_and_told_with_exit_code_1(data: Path) -> None:
    log = entry_logs(data / "bookie")[0]
    record = next(
        line
        for line in Run("entrylog", "dump", log.name, "--json", data=data).lines
        if line["kind"] == "record" and line["type"] == "entry"
    )
    place = f"{record['ledger_id']}:{record['entry_id']}"
    flip(log, record["position"] + 70)
    try:
        verified = Run("verify", data=data)
        assert verified.code == 1
        assert "NOT SOUND" in verified.out
        assert place in verified.out
        dumped = Run("entrylog", "dump", log.name, data=data)
        assert dumped.code == 1
        assert f"DAMAGE at byte {record['position']}" in dumped.out
    finally:
        flip(log, record["position"] + 70)


@pytest.mark.real
def test_the_index_is_made_anew(data: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(data, tmp_path / "copy"))
    before = with_stopped(copy / "bookie", totals)
    waiting = Run("journal", "dump", "--from-mark", "--json", data=copy).lines
    assert not any(line.get("type") == "ADD" for line in waiting)
    shutil.rmtree(copy / "bookie" / "index")
    lost = Run("verify", data=copy)
    assert lost.code == 1
    assert "index rebuild" in lost.out
    assert "say --yes" in Run("index", "rebuild", data=copy).complaint
    rebuilt = Run("index", "rebuild", "--yes", "--json", data=copy)
    assert rebuilt.code == 0
    assert rebuilt.lines[0]["entries"] == sum(before.values())
    assert Run("verify", data=copy).code == 0
    assert with_stopped(copy / "bookie", totals) == before


def contents_of(data: Path) -> Iterator[dict[str, Any]]:
    for row in Run("ledgers", "--json", data=data).lines:
        if row["ranges"]:
            for line in Run("read", row["ledger_id"], "--messages", "--json", data=data).lines:
                yield line["content"]


def values(contents: list[dict[str, Any]]) -> list[str]:
    return [
        message["value"]
        for content in contents
        if content["kind"] == "messages"
        for message in content["messages"]
    ]


@pytest.mark.real
def test_rule_01_what_a_killed_service_acknowledged_is_there(tmp_path: Path) -> None:
    service = Service(tmp_path / "data")
    service.start()
    acknowledged: list[str] = []
    try:
        with connect(service.url) as client, client.create_producer("orders") as producer:
            for number in range(50):
                producer.send(b"%d" % number)
                acknowledged.append(str(number))
            service.kill("both")
    finally:
        service.stop()
    verified = Run("verify", "--json", data=service.data)
    assert verified.code == 0, verified.out
    service.start()
    try:
        stored = values(list(contents_of(service.data)))
    finally:
        service.stop()
    assert stored[: len(acknowledged)] == acknowledged


def test_a_lost_bookie_is_replaced(tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    assert "say --yes" in Run("cookie", "--accept-new-disk", "b7", data=lost).complaint
    assert not lost.exists()
    made = Run("cookie", "--accept-new-disk", "b7", "--yes", "--json", data=lost)
    assert (made.code, made.lines[0]["repairing"], made.lines[0]["bookie_id"]) == (0, True, "b7")
    again = Run("cookie", "--accept-new-disk", "b7", "--yes", data=lost)
    assert (again.code, "did not lose its disks" in again.complaint) == (1, True)


@pytest.mark.real
def test_read_only_and_back(data: Path) -> None:
    assert Run("convert-to-read-only", "--reason", "its disk makes noises", data=data).code == 0
    assert Run("info", "--json", data=data).lines[0]["read_only_reason"] == "its disk makes noises"
    assert Run("convert-to-read-only", "--undo", "--json", data=data).lines[0]["read_only"] is False
    assert Run("info", "--json", data=data).lines[0]["read_only"] is False


@pytest.mark.real
@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["ledgers"], 1, "is stopped, and only a running one lists its ledgers"),
        (["read", "1"], 1, "start it, or see what `magnetar bookie entrylog dump`"),
        (["cookie", "--lost-directory", "/x", "--yes"], 1, "/x is no ledger directory"),
        (["cookie", "--lost-directory", "/x"], 2, "say --yes"),
        (["cookie", "--moved-directory", "x"], 2, "is not OLD=NEW"),
        (["cookie", "--moved-directory", "x=y", "--lost-directory", "x"], 2, "exclude each other"),
        (["entrylog", "dump", "ffffffff"], 1, "there is no entry log ffffffff"),
        (["journal", "dump", "nope"], 1, "there is no journal file nope"),
        (["journal", "dump", "--journal", "5"], 1, "there is no journal directory 5"),
        (["verify", "--set", "bookie.nope=1"], EXIT_CONFIG, "bookie.nope"),
    ],
)
def test_bad_input_is_one_clear_line(data: Path, arguments: list[str], code: int, complaint: str) -> None:
    run = Run(*arguments, data=data)
    assert run.code == code
    assert complaint in run.complaint


@pytest.mark.real
def test_what_is_no_data_directory_is_one_clear_line(data: Path, tmp_path: Path) -> None:
    assert "does not exist" in Run("ledgers", data=tmp_path / "nothing").complaint
    (tmp_path / "bookie").mkdir()
    assert "not the data directory of a bookie" in Run("ledgers", data=tmp_path).complaint
    assert f"--data {data}" in Run("ledgers", data=data / "bookie").complaint
    assert sorted(os.listdir(tmp_path / "bookie")) == []


@pytest.mark.real
def test_a_subcommand_behind_the_flags_is_told_where_it_belongs(data: Path) -> None:
    late = Run("--data", str(data), "ledgers", as_process=True)
    assert late.code == 2
    assert "magnetar bookie ledgers" in late.complaint
