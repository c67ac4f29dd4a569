"""The flags of the daemons: one table for the lean parser, which starts them, and for the help page and completion.

A daemon must not pay for typer and rich (40 ms and 7 MB), so `magnetar standalone ...` is parsed here; only `--help`, and
the commands of people, go through typer.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from magnetar.proto.errors import InvalidSetting

SECTIONS = ("daemon", "bookie", "broker", "ledger", "repair", "balance")
_HELP = ("-h", "--help")


class UsageError(Exception):
    """The command line is wrong; the text says what to do."""


class Flag(NamedTuple):
    """`setting` is "section.name", or one of "config" and "set"."""

    option: str
    setting: str
    metavar: str
    help: str


_COMMON = (
    Flag("--host", "daemon.host", "HOST", "Address to listen on; default 127.0.0.1."),
    Flag("--http-port", "daemon.http_port", "N", "Metrics and health; 0 takes a free port."),
    Flag("--config", "config", "FILE", "Settings in TOML; also MAGNETAR_CONFIG."),
    Flag("--log-level", "daemon.log_level", "LEVEL", "debug, info, warning or error."),
    Flag("--log-format", "daemon.log_format", "FORMAT", "console, json, or auto: console on a terminal."),
    Flag("--set", "set", "SECTION.NAME=VALUE", "Any setting that `magnetar config` lists; may be repeated."),
)
_DATA = Flag("--data", "daemon.data", "DIR", "Data directory, made if it is not there; ./data by default.")
_PORT = Flag("--port", "daemon.port", "N", "Native protocol, 7650; 0 takes a free port.")
_PULSAR_PORT = Flag("--pulsar-port", "broker.pulsar_port", "N", "Pulsar's protocol, 6650; 0: none.")
_ADVERTISED = Flag("--advertised-host", "daemon.advertised_host", "HOST", "Address that clients connect to.")

_METADATA = Flag(
    "--metadata", "daemon.metadata", "URL", "Metadata shared by a cluster: zk://host:port,host:port/root."
)

FLAGS: dict[str, tuple[Flag, ...]] = {
    "standalone": (
        _DATA,
        _PORT,
        _PULSAR_PORT,
        Flag("--bookie-port", "daemon.bookie_port", "N", "Bookie protocol, 3181; 0 takes a free port."),
        _ADVERTISED,
        *_COMMON,
    ),
    "bookie": (
        _DATA,
        Flag("--port", "daemon.bookie_port", "N", "Bookie protocol, 3181; 0 takes a free port."),
        Flag("--id", "bookie.bookie_id", "NAME", "Name of this bookie; stored in its data directory."),
        _METADATA,
        *_COMMON,
    ),
    "autorecovery": (_METADATA, *_COMMON),
    "broker": (
        _DATA,
        _PORT,
        _PULSAR_PORT,
        _METADATA,
        Flag(
            "--bookies",
            "daemon.bookies",
            "HOST:PORT,...",
            "Without --metadata: the bookies, separated by commas.",
        ),
        _ADVERTISED,
        *_COMMON,
    ),
}
SUMMARIES = {
    "standalone": "Run the whole service on this machine: metadata, bookie, broker, metrics.",
    "bookie": "Run a bookie: it stores ledgers for brokers. With a subcommand: look after a stopped one.",
    "autorecovery": "Run repairs of a cluster in a process of their own; bookies run them, too.",
    "broker": "Run a broker on separate bookies: those of a cluster (--metadata), or a list of its own (--bookies).",
}


@dataclass
class ParsedFlags:
    """By section; `config` is the settings file."""

    config: str | None = None
    sections: dict[str, dict[str, str]] = field(default_factory=dict)

    def give(self, flag: Flag, value: str) -> None:
        """Takes one occurrence of a flag. Raises InvalidSetting."""
        if flag.setting == "config":
            self.config = value
            return
        if flag.setting == "set":
            section, name, value = parse_assignment(value)
        else:
            section, _, name = flag.setting.partition(".")
        self.sections.setdefault(section, {})[name] = value


def is_daemon(line: Sequence[str]) -> bool:
    """Whether it starts a daemon. `magnetar bookie` alone or with flags does; followed by a word it is for an operator."""
    if not line or line[0] not in FLAGS or any(option in line for option in _HELP):
        return False
    return line[0] != "bookie" or len(line) == 1 or line[1].startswith("-")


def parse_assignment(text: str) -> tuple[str, str, str]:
    """`section.name=value` of `--set`. Raises InvalidSetting."""
    name, equals, value = text.partition("=")
    section, dot, setting = name.strip().partition(".")
    if not equals or not dot or section not in SECTIONS:
        raise InvalidSetting(
            f"--set {text!r} is not section.name=value with a section of {', '.join(SECTIONS)}; "
            "`magnetar config` lists all settings"
        )
    return section, setting.replace("-", "_"), value.strip()


def parse_flags(command: str, line: Sequence[str]) -> ParsedFlags:
    """Reads `--name value` and `--name=value`. Raises UsageError or InvalidSetting."""
    known = {flag.option: flag for flag in FLAGS[command]}
    parsed = ParsedFlags()
    rest = list(line)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        flag = known.get(option)
        if flag is None:
            close = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"see magnetar {command} --help"
            if command == "bookie" and not option.startswith("-"):
                hint = f"a subcommand comes first: magnetar bookie {option} ..."
            what = "option" if option.startswith("-") else "argument"
            raise UsageError(f"magnetar {command} has no {what} {option}; {hint}")
        if not equals:
            if not rest:
                raise UsageError(f"{option} needs a value: {option} {flag.metavar}")
            value = rest.pop(0)
        parsed.give(flag, value)
    return parsed
