"""Addresses for people to read, and the error when one cannot be listened on."""

from __future__ import annotations

import errno
from typing import Any

from magnetar.proto.errors import InvalidSetting, MagnetarError, ServiceNotReady


def format_address(peername: Any) -> str:
    """ "host:port" of what `get_extra_info("peername")` gave."""
    if isinstance(peername, tuple) and len(peername) >= 2:
        host, port = peername[:2]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return str(peername) if peername else "an unknown address"


def listen_error(error: OSError, host: str, port: int, setting: str, flag: str = "") -> MagnetarError:
    """The error for an operator when listening fails; ServiceNotReady if the port may be free at the next start."""
    if error.errno == errno.EADDRINUSE:
        return ServiceNotReady(
            f"port {port} on {host or 'all addresses'} is in use by another process; stop it, or choose another port: "
            f"{flag or '--' + setting.replace('_', '-')} N (the setting {setting!r})",
            setting=setting,
        )
    return InvalidSetting(
        f"cannot listen on {host}:{port}: {error.strerror or error}; check the settings of host and {setting!r}",
        setting=setting,
    )
