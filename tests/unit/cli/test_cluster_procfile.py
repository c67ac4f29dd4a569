"""`make cluster`: the command lines of its daemons are right."""

import shlex
from pathlib import Path

from magnetar.cli.flags import parse_flags
from magnetar.cli.settings import SettingSources, service_settings

PROCFILE = Path(__file__).parents[3] / "deploy" / "cluster" / "Procfile"


def test_the_daemons_of_the_procfile_have_good_settings_and_ports_of_their_own() -> None:
    ports: list[int] = []
    commands: list[str] = []
    for line in PROCFILE.read_text().splitlines():
        words = shlex.split(line)
        if "deploy/cluster/daemon.sh" not in words:
            continue
        command, *rest = words[words.index("deploy/cluster/daemon.sh") + 1 :]
        commands.append(command)
        settings = service_settings(SettingSources(flags=parse_flags(command, rest).sections), command)
        own = settings.daemon.bookie_port if command == "bookie" else settings.daemon.port
        ports += [own, settings.daemon.http_port]
    assert sorted(commands) == ["bookie", "bookie", "bookie", "broker"]
    assert len(set(ports)) == len(ports)
