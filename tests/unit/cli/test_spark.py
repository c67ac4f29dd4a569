"""`magnetar spark JOB` without Spark: one line that names the cure; its errors as one line each."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from magnetar.cli.app import app
from magnetar.cli.commands import spark_run
from magnetar.spark import jobs, program

JOBS = {
    "archive": ["orders", "--path", "/nowhere"],
    "audit": ["orders"],
    "compact": ["orders", "--to-topic", "x"],
    "replay": ["orders", "--to-topic", "x"],
    "rollup": ["orders", "--to-topic", "x", "--checkpoint", "/nowhere"],
}


@pytest.mark.parametrize("job", JOBS)
def test_without_the_extra_one_line_names_the_cure(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec

    def find(name: str, *more: Any) -> Any:
        return None if name in spark_run.REQUIRED else real(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    ended = CliRunner().invoke(app, ["spark", job, *JOBS[job]])
    assert ended.exit_code == 1
    assert ended.stderr == (
        "magnetar: jobs of the data pipeline need Spark: pip install 'magnetar[spark]'  "
        "(missing: pyspark, pyarrow)\n"
    )


@pytest.mark.real
def test_the_command_tree_imports_no_spark() -> None:
    code = "import sys, magnetar.cli.app; print(sorted({'pyspark', 'pyarrow', 'magnetar.spark'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_setting_of_spark_that_is_none() -> None:
    ended = CliRunner().invoke(app, ["spark", "audit", "orders", "--conf", "spark.executor.memory"])
    assert ended.exit_code == 2
    assert "--conf is 'spark.executor.memory'; want NAME=VALUE, as spark." in ended.stderr


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[PYTHON_DATA_SOURCE_ERROR] Traceback ...\nmagnetar.proto.errors.MessageLost: ledger 3 was trimmed\n more",
            "ledger 3 was trimmed",
        ),
        ("[USER_RAISED_EXCEPTION] InvalidArgument: the key FF is not text", "the key FF is not text"),
        ("\n[PATH_ALREADY_EXISTS] Path /x exists.\nmore", ""),
    ],
)
def test_what_magnetar_said_is_found_in_an_error_of_spark(text: str, line: str) -> None:
    assert program.quoted_error(text) == line


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("option service_url is 'x'; want ...", "--url is 'x'; want ..."),
        ("either to_topic or to_parquet says where", "either --to-topic or --to-parquet says where"),
        ("option start is 'x'; want earliest", "--start is 'x'; want earliest"),
        ("option topics: no name", "TOPIC: no name"),
        (
            "from_offset 9 and before_offset 3 are no range",
            "--from-offset 9 and --before-offset 3 are no range",
        ),
        ("path /x: /x is no folder", "--path /x: /x is no folder"),
        # Words that are no names of options.
        ("the start of the end; name another path", "the start of the end; name another path"),
    ],
)
def test_errors_name_options_of_the_command(message: str, told: str) -> None:
    assert spark_run.as_flags(message) == told


def test_an_error_of_java_is_its_telling_line() -> None:
    told = "An error occurred while calling None.X.\n: org.SparkException: Could not parse Master URL: 'x'\n\tat a.b"
    assert program.of_java(told) == "org.SparkException: Could not parse Master URL: 'x'"
    assert program.of_java("\nplain\nmore") == "plain"
    told = "[X] Failed: Traceback (most recent call last):\n  File 'x', line 3\n    f()\nKeyError: 'a'\n\n\tat a.b"
    assert program.of_java(told) == "KeyError: 'a'"


def java_that_says(path: Path, version: str) -> None:
    (path / "bin").mkdir(parents=True)
    java = path / "bin" / "java"
    java.write_text(f"#!/bin/sh\necho '{version}' >&2\n")
    java.chmod(0o755)


@pytest.mark.real
@pytest.mark.parametrize(
    ("version", "told"),
    [
        ('openjdk version "17.0.15" 2025-04-15', ""),
        ('openjdk version "21" 2023-09-19', ""),
        ('java version "1.8.0_392"', "is Java 8, which Spark does not run on: install Java 17"),
        ('openjdk version "11.0.2" 2019', "is Java 11, which Spark does not run on: install Java 17"),
    ],
)
def test_java_of_another_version_is_told_before_spark_starts(
    version: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    java_that_says(tmp_path, version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if not told:
        spark_run.require_java()
        return
    with pytest.raises(SystemExit) as ended:
        spark_run.require_java()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_no_java_at_all_is_one_line_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        spark_run.require_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    with pytest.raises(SystemExit):
        spark_run.require_java()
    first, second = capsys.readouterr().err.splitlines()
    assert "Spark needs Java, and there is none at the PATH: install Java 17 or newer" in first
    assert f"none at {tmp_path}/gone/bin/java" in second


@pytest.mark.real
def test_a_java_machine_that_does_not_start_says_why_and_leaves_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    java_that_says(tmp_path, "Error: nothing starts here")
    with (tmp_path / "bin" / "java").open("a") as script:
        script.write("exit 1\n")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    states: list[str] = []
    order = program.Order(job="audit", url="", options={}, settings={"spark.master": "local"}, watched=False)
    with pytest.raises(SystemExit) as ended:
        spark_run.run_program(order, states.append)
    assert (ended.value.code, states) == (1, [program.STARTING])
    line = capsys.readouterr().err
    assert line.startswith("magnetar: Spark does not start: Error: nothing starts here (Spark's log: ")
    log = Path(line.split("log: ")[1].rstrip(")\n"))
    assert "nothing starts here" in log.read_text()
    shutil.rmtree(log.parent)


def test_an_argument_is_named_as_it_is_given_here() -> None:
    text = "with_backlog says what may leave the bookies, and without trim nothing does; give both"
    assert spark_run.as_flags(text).startswith("--with-backlog says what")


def report_of(job: str, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """What the command prints for a job whose program ends with this report."""
    monkeypatch.setattr(program, "check", lambda *_: None)
    monkeypatch.setattr(spark_run, "require_java", lambda: None)
    monkeypatch.setattr(spark_run, "run_program", lambda *_: json.loads(json.dumps(report)))
    return CliRunner().invoke(app, ["spark", job, *JOBS[job], *arguments])


@pytest.mark.parametrize("damaged", [False, True])
def test_what_was_trimmed_and_what_was_not(damaged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = jobs.KeptLedgers("orders", 16, 2, "subscription 'slow' has not acknowledged all of it", damaged)
    result = jobs.ArchiveResult((), 5, 1, (("orders", 12), ("orders", 14)), 7, 3, (kept,))
    monkeypatch.setattr(jobs, "archive", lambda *_, **__: result)
    options = {"topics": ["orders"], "path": "/a", "file_mb": 1, "trim": True, "moved": True}
    order: program.Order = {"job": "archive", "url": "", "options": options, "settings": {}, "watched": False}
    report = program.perform(cast("Any", None), order, lambda _state: None)["report"]
    ended = report_of("archive", report, monkeypatch)
    assert ended.exit_code == int(damaged)
    lines = ended.stdout.splitlines()
    assert (
        "orders: 2 ledgers stay as they are, from 16 on: subscription 'slow' has not acknowledged all of it"
        in lines
    )
    for name, figure in (
        ("ledgers trimmed", "2"),
        ("kept as they are", "2"),
        ("ledgers moved", "7"),
        ("in another archive", "1"),
    ):
        assert any(line.strip("│ ").split() == [*name.split(), "│", figure] for line in lines), lines
    told = json.loads(report_of("archive", report, monkeypatch, "--json").stdout)
    assert told["trimmed"] == [{"topic": "orders", "ledger": 12}, {"topic": "orders", "ledger": 14}]
    assert (told["not_in_topic"], told["archived_before"], told["kept"][0]["first"]) == (3, 5, 16)


def test_differences_are_a_table_that_says_how_many_more_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    row: dict[str, Any] = {
        "topic": "t",
        "ledger": 7,
        "stored_ledger": 7,
        "first_entry": 3,
        "last_entry": 9,
        "bookie": "b:3181",
        "state": "missing",
        "detail": "",
    }
    table = program.differences([row, {**row, "ledger": 12, "state": "differs", "detail": "other"}])
    report = program.Report({}, "audited t", {}, table, ["1,000 more; --to-parquet PATH writes all"], True)
    ended = report_of("audit", dataclasses.asdict(report), monkeypatch)
    assert ended.exit_code == 1
    assert "│ t     │               7 │     3-9 │ b:3181 │ missing │        │" in ended.stdout
    assert "│ t     │          12 (7) │     3-9 │ b:3181 │ differs │ other  │" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "1,000 more; --to-parquet PATH writes all"


class Query:
    """What a streaming query tells of its last batches."""

    def __init__(self) -> None:
        self.recentProgress: list[dict[str, Any]] = []


def test_figures_of_a_stream_count_each_batch_once() -> None:
    query, figures = Query(), program.StreamFigures()
    for batch in range(4):
        told = {
            "batchId": batch,
            "numInputRows": 10,
            "eventTime": {"watermark": f"w{batch}"} if batch < 3 else {},
        }
        query.recentProgress = [*query.recentProgress[-1:], told]
        for _ in range(2):
            figures.add(query)  # type: ignore[arg-type]
    assert (figures.batches, figures.rows_read, figures.watermark) == (4, 40, "w2")
