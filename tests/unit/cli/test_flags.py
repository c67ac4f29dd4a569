"""The daemons' flags: the lean parser and the help page know the same ones."""

from __future__ import annotations

import re

import pytest
import typer.main

from magnetar.cli.app import app
from magnetar.cli.wiring.flags import FLAGS, UsageError, parse_flags
from magnetar.cli.wiring.settings import SettingSources, load_all
from magnetar.proto.errors import InvalidSetting


def test_flags_by_both_forms() -> None:
    parsed = parse_flags(
        "standalone",
        [
            "--data",
            "d",
            "--port=1",
            "--set",
            "bookie.entry_log_bytes=2MiB",
            "--set=broker.name=x",
            "--config",
            "f",
        ],
    )
    assert parsed.config == "f"
    assert parsed.sections == {
        "daemon": {"data": "d", "port": "1"},
        "bookie": {"entry_log_bytes": "2MiB"},
        "broker": {"name": "x"},
    }


def test_the_last_one_counts() -> None:
    assert parse_flags("bookie", ["--port", "1", "--port", "2"]).sections == {"daemon": {"bookie_port": "2"}}


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (["--prot", "1"], "did you mean --port?"),
        (["--port"], "--port needs a value: --port N"),
        (["x"], "no argument x"),
        (["--bookies", "b:1"], "no option --bookies"),
    ],
)
def test_what_is_wrong_is_named(line: list[str], part: str) -> None:
    with pytest.raises(UsageError, match=re.escape(part)):
        parse_flags("standalone", line)


@pytest.mark.parametrize("text", ["x=1", "bookie.x", "nothing.x=1", ""])
def test_set_wants_section_name_and_value(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"section\.name=value"):
        parse_flags("standalone", ["--set", text])


def test_every_flag_is_a_setting() -> None:
    known = {loaded.section: set(loaded.sources) for loaded in load_all(SettingSources())}
    for flags in FLAGS.values():
        for flag in flags:
            if flag.setting not in ("config", "set"):
                section, name = flag.setting.split(".")
                assert name in known[section], flag


def test_help_shows_the_flags_of_the_lean_parser() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(FLAGS) <= set(commands)
    for command, flags in FLAGS.items():
        shown = {option for parameter in commands[command].params for option in parameter.opts}
        assert {flag.option for flag in flags} <= shown
