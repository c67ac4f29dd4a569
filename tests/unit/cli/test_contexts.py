"""`magnetar context`: which service a command talks to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from magnetar.cli.app import app
from magnetar.cli.terminal.options import DEFAULT_URL, Url

ASKED = typer.Typer()


@ASKED.command()
def asked(url: Url = DEFAULT_URL) -> None:
    print(url)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MAGNETAR_CONTEXTS", str(tmp_path / "below" / "contexts.json"))
    monkeypatch.delenv("MAGNETAR_URL", raising=False)
    return tmp_path / "below" / "contexts.json"


def context(*line: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, ["context", *line])
    assert found.exit_code == code, found.output
    return found.output


def url(*line: str, **environment: str) -> str:
    found: Result = CliRunner().invoke(ASKED, line, env=environment)
    return found.output.strip()


def test_the_option_comes_first_then_the_environment_then_the_context_then_this_machine() -> None:
    assert url() == "magnetar://127.0.0.1:7650"
    context("add", "prod", "--url", "magnetar://prod:7650", "--use")
    context("add", "test", "--url", "magnetar://test:7650")
    assert url() == "magnetar://prod:7650"
    assert url(MAGNETAR_URL="magnetar://there:1") == "magnetar://there:1"
    assert url("--url", "magnetar://here:1", MAGNETAR_URL="magnetar://there:1") == "magnetar://here:1"
    context("use", "test")
    assert url() == "magnetar://test:7650"
    assert json.loads(context("list", "--json"))["current"] == "test"
    context("remove", "test")
    assert url() == "magnetar://127.0.0.1:7650"
    context("use", "prod")
    context("use", "-")
    assert url() == "magnetar://127.0.0.1:7650"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("use", "nobody"), "there is no context 'nobody'; there are: prod"),
        (("remove", "nobody"), "there is no context 'nobody'"),
        (("add", "x", "--url", "http://a"), "not a service URL: 'http://a'"),
        (("add", " ", "--url", "magnetar://a:1"), "cannot be called ' '"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_changes_nothing(
    line: tuple[str, ...], said: str, file: Path
) -> None:
    context("add", "prod", "--url", "magnetar://prod:7650")
    before = file.read_bytes()
    output = context(*line, code=2)
    assert said in output
    assert len(output.strip().splitlines()) == 1
    assert file.read_bytes() == before


def test_a_damaged_file_is_named(file: Path) -> None:
    file.parent.mkdir()
    file.write_text('{"current": 5}')
    assert f"{file} cannot be read" in context("list", code=2)
    assert f"the context in use: {file} cannot be read" in url()
