"""Ledger settings that cannot work, from every place where a setting can come from: one error that names it and the cure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from magnetar.cli.wiring.settings import SettingSources, check_bookie_count, service_settings
from magnetar.proto.errors import InvalidSetting

# section, settings, and what the error must say.
WRONG: list[tuple[str, dict[str, str], str]] = [
    ("ledger", {"ack_quorum": "3"}, r"ack_quorum=3 do not fit .*lower ack_quorum to 2 or raise write_quorum"),
    ("ledger", {"write_quorum": "4"}, r"ensemble_size=3, write_quorum=4.*lower write_quorum to 3 or raise ensemble_size"),
    ("ledger", {"ensemble_size": "65"}, r"ensemble_size=65.*can be 64 at most"),
    ("ledger", {"ack_quorum": "0"}, r"ack_quorum=0.*at least 1"),
    ("ledger", {"ensemble_size": "0"}, r"ensemble_size=0"),
    ("ledger", {"ensemble_size": "two"}, r"ensemble_size"),
    ("broker", {"ensemble_size": "3", "write_quorum": "2", "ack_quorum": "3"}, r"ack_quorum=3.*lower ack_quorum to 2"),
    ("broker", {"ensemble_size": "1", "write_quorum": "2"}, r"ensemble_size=1, write_quorum=2.*lower write_quorum to 1"),
    ("ledger", {"placement": "moon"}, r"placement='moon' is not known; it can be random, rack or zone"),
    ("ledger", {"placement_strict": "true"}, r"placement_strict=true.*set placement to rack or zone"),
    ("ledger", {"placement": "rack", "placement_minimum_racks": "0"}, r"placement_minimum_racks=0 must be at least 1"),
    ("ledger", {"placement_max_weight_ratio": "nan"}, r"placement_max_weight_ratio=nan must be at least 1"),
    ("ledger", {"minimum_write_quorum": "-1"}, r"minimum_write_quorum=-1 must be 0 \(off\) or a number of bookies"),
    ("ledger", {"minimum_write_quorum": "65"}, r"minimum_write_quorum=65 must be"),
    ("ledger", {"minimum_write_quorum": "1.5"}, r"minimum_write_quorum"),
    *(
        ("ledger", {name: value}, rf"{name}.*{said}")
        for name in (
            "add_timeout_s",
            "read_timeout_s",
            "metadata_timeout_s",
            "connect_timeout_s",
            "reconnect_backoff_s",
            "bookie_info_interval_s",
            "quarantine_window_s",
            "quarantine_s",
        )
        for value, said in (("0", "above 0 seconds"), ("-5", ""), ("nan", ""), ("inf", ""), ("soon", ""))
    ),
    *(
        ("ledger", {name: value}, name)
        for name in ("speculative_read_s", "explicit_lac_interval_s", "explicit_lac_backoff_max_s", "suspect_bookie_s")
        for value in ("-1", "nan", "inf")
    ),
    ("ledger", {"reconnect_backoff_s": "10", "reconnect_backoff_max_s": "5"}, r"reconnect_backoff_max_s=5"),
    ("ledger", {"max_outstanding_bytes": "1KB"}, r"max_outstanding_bytes=1000 must be at least 1 MiB"),
    ("ledger", {"quarantine_errors": "-1"}, r"quarantine_errors=-1 must not be negative \(0: never\)"),
    ("ledger", {"ensemble": "3"}, r"ensemble"),
    ("bookie", {"journal_stall_s": "0"}, r"journal_stall_s"),
]  # fmt: skip


def named(case: tuple[str, dict[str, str], str]) -> str:
    section, given, _ = case
    return section + " " + ",".join(f"{name}={value}" for name, value in given.items())


def in_toml(section: str, given: dict[str, str]) -> str:
    def value(text: str) -> str:
        try:
            float(text)
        except ValueError:
            return text if text == "true" else f'"{text}"'
        return text

    return f"[{section}]\n" + "".join(f"{name} = {value(text)}\n" for name, text in given.items())


@pytest.mark.parametrize("source", ["file", "environment", "flag"])
@pytest.mark.parametrize("case", WRONG, ids=named)
def test_one_error_names_the_setting_wherever_it_comes_from(
    case: tuple[str, dict[str, str], str], source: str, tmp_path: Path
) -> None:
    section, given, said = case
    sources: dict[str, Any] = {}
    if source == "file":
        file = tmp_path / "m.toml"
        file.write_text(in_toml(section, given))
        sources["config"] = str(file)
    elif source == "environment":
        sources["environment"] = {f"MAGNETAR_{section}_{name}".upper(): text for name, text in given.items()}
    else:
        sources["flags"] = {section: given}
    if source == "environment" and "ensemble" in given:
        pytest.skip("a variable that is no setting is not ours to refuse")
    with pytest.raises(InvalidSetting, match=said) as raised:
        service_settings(SettingSources(**sources))
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    ("quorums", "minimum", "count", "fits"),
    [
        ((3, 2, 2), 0, 3, True),
        ((3, 2, 2), 0, 2, False),
        ((3, 2, 2), 2, 2, True),
        ((3, 2, 2), 3, 2, True),  # for two copies the minimum is both
        ((3, 3, 2), 3, 2, False),
        ((3, 3, 2), 1, 1, True),
        ((1, 1, 1), 0, 1, True),
    ],
)
def test_more_bookies_asked_for_than_there_are(
    quorums: tuple[int, int, int], minimum: int, count: int, fits: bool
) -> None:
    broker = dict(zip(("ensemble_size", "write_quorum", "ack_quorum"), quorums, strict=True))
    settings = service_settings(
        SettingSources(flags={"broker": broker, "ledger": {"minimum_write_quorum": minimum}})
    )
    if fits:
        check_bookie_count(settings, count, "--bookies")
        return
    with pytest.raises(
        InvalidSetting, match=rf"broker\.ensemble_size=3 needs 3 bookies.*{count} \(--bookies\); lower"
    ):
        check_bookie_count(settings, count, "--bookies")


COMMANDS: list[tuple[list[str], str]] = [
    (["config", "--set", "ledger.ack_quorum=3"], "lower ack_quorum to 2"),
    (["broker", "--bookies", "127.0.0.1:1", "--set", "ledger.placement=moon"], "placement='moon' is not known"),
    (["broker", "--bookies", "127.0.0.1:1", "--set", "ledger.add_timeout_s=0"], "add_timeout_s=0"),
    (["broker", "--bookies", "127.0.0.1:1", "--set", "broker.ensemble_size=2"], "broker.ensemble_size=2 needs 2 bookies"),
    (["broker", "--bookies", "127.0.0.1"], "want host:port"),
    (["standalone", "--set", "broker.ensemble_size=3"], "broker.ensemble_size=3 needs 3 bookies, and there is 1"),
]  # fmt: skip


@pytest.mark.real
@pytest.mark.parametrize(
    ("arguments", "said"), COMMANDS, ids=[" ".join(arguments) for arguments, _ in COMMANDS]
)
def test_the_commands_say_it_in_one_line_and_exit_with_78(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "magnetar.cli.main", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = done.stderr + done.stdout
    assert done.returncode == 78, told
    assert said in " ".join(told.split())
    assert "Traceback" not in told
    assert not list(tmp_path.rglob("metadata")), "nothing was begun"
