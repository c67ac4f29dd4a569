"""`magnetar spark JOB` without Spark: one line that names the cure; its errors as one line each."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from magnetar.cli import spark_jobs
from magnetar.cli.app import app

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
        return None if name in spark_jobs.REQUIRED else real(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    ended = CliRunner().invoke(app, ["spark", job, *JOBS[job]])
    assert ended.exit_code == 1
    assert ended.stderr == (
        "magnetar: jobs of the data pipeline need Spark: pip install 'magnetar[spark]'  "
        "(missing: pyspark, pyarrow)\n"
    )


def test_the_command_tree_imports_no_spark() -> None:
    code = "import sys, magnetar.cli.app; print(sorted({'pyspark', 'pyarrow', 'magnetar.spark'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_setting_of_spark_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert spark_jobs.settings_of(["a.b=c=d", "e="]) == {"a.b": "c=d", "e": ""}
    with pytest.raises(SystemExit) as ended:
        spark_jobs.settings_of(["spark.executor.memory"])
    assert ended.value.code == 2
    assert "want NAME=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "[PYTHON_DATA_SOURCE_ERROR] Traceback ...\nmagnetar.proto.errors.MessageLost: ledger 3 was trimmed\n more",
            "ledger 3 was trimmed",
        ),
        ("[USER_RAISED_EXCEPTION] InvalidArgument: the key FF is not text", "the key FF is not text"),
        ("\n[PATH_ALREADY_EXISTS] Path /x exists.\nmore", "Spark: [PATH_ALREADY_EXISTS] Path /x exists."),
    ],
)
def test_errors_of_spark_become_one_line(text: str, line: str) -> None:
    assert spark_jobs.told_by_spark(text) == line
