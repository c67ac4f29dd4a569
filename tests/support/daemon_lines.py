"""Command lines of daemons as they stand in units, manifests and compose files: are they what Magnetar accepts?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from magnetar.cli.wiring.flags import parse_flags
from magnetar.cli.wiring.settings import ServiceSettings, SettingSources, service_settings

__all__ = ["daemon_settings"]


def daemon_settings(line: Sequence[str], environment: Mapping[str, str]) -> ServiceSettings:
    """The settings of `magnetar LINE` in this environment. Raises what the daemon would end with, for unknown names, too."""
    command, *rest = line
    known = {name: value for name, value in environment.items() if name.startswith("MAGNETAR_")}
    return service_settings(SettingSources(None, known, parse_flags(command, rest).sections), command)
