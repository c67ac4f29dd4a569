"""The daemons as processes: settings, event loop, logs, the ready line, metrics, signals, exit codes.

    magnetar standalone is ready: magnetar://127.0.0.1:7650 pulsar://127.0.0.1:6650 bookie://127.0.0.1:3181
    http://127.0.0.1:8080 data=/srv/data

is one line, the only one on standard output; logs go to standard error. Exit codes: 0 stopped by a signal, 1 cannot start,
2 wrong command line, 70 a component failed (start it again: it recovers), 78 a wrong setting.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from magnetar.proto.errors import InvalidSetting, MagnetarError, ServiceNotReady
from magnetar.runtime.allocator import keep_large_buffers
from magnetar.runtime.connection.addresses import listen_error
from magnetar.runtime.lifecycle import EXIT_CONFIG, Daemon, run_daemon

from .flags import UsageError, parse_flags
from .health import HttpPages
from .lazy_imports import LazyHttp, LazyLogs
from .settings import (
    ServiceSettings,
    SettingSources,
    check_bookie_count,
    format_host,
    parse_bookies,
    service_settings,
)

if TYPE_CHECKING:
    from magnetar.bookie import Bookie

    from .service import Address

_log = logging.getLogger(__name__)

EXIT_USAGE = 2
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def main(command: str, line: Sequence[str]) -> int:
    """Runs a daemon to its end; returns the exit code."""
    try:
        flags = parse_flags(command, line)
        settings = service_settings(SettingSources.of_process(flags.sections, flags.config), command)
        _check_together(command, settings)
    except UsageError as error:
        print(f"magnetar: {error}", file=sys.stderr)
        return EXIT_USAGE
    except InvalidSetting as error:
        print(f"magnetar: {error.message}", file=sys.stderr)
        return EXIT_CONFIG
    logs = LazyLogs(format=settings.daemon.log_format, level=settings.daemon.log_level, daemon=command)
    logs.install()
    keep_large_buffers()
    data = os.path.abspath(settings.daemon.data)

    async def start(daemon: Daemon) -> None:
        pages = HttpPages(daemon)
        host = settings.daemon.host
        # From now on probes are answered: a bookie that replays for a minute is alive, and not ready.
        try:
            http = LazyHttp.bind(
                host,
                settings.daemon.http_port,
                pages,
                imports=(
                    "magnetar.cli.wiring.metrics",
                    *(["magnetar.bookie.shell"] if command in ("standalone", "bookie") else []),
                ),
            )
        except ServiceNotReady:
            _check_alone(settings)
            raise
        daemon.on_stop("http", http.close)
        supervisor = os.environ.get("NOTIFY_SOCKET", "")
        from .service import Service, system_components
        from .starters import STARTERS

        service = Service(
            _with_ports(settings, command, http.address[1]), system_components(), on_failure=daemon.fail
        )
        daemon.on_stop(command, service.close)
        started = pages.started = await STARTERS[command](service)
        if started.bookie is not None:
            _note_http_address(started.bookie, http.address)
        urls = [
            f"{scheme}://{format_host(host)}:{port}" for scheme, (host, port) in started.addresses.items()
        ]
        urls.append(f"http://{format_host(http.address[0])}:{http.address[1]}")
        print(f"magnetar {command} is ready: {' '.join(urls)} data={data}", flush=True)
        notify_supervisor(supervisor, "READY=1")
        daemon.on_stop("supervisor", partial(_stopping, supervisor))
        logs.ready()
        if not _is_loopback(host):
            _log.warning(
                "listening on %s without authentication: whoever reaches the ports can read and write everything; "
                "set daemon.host to 127.0.0.1 or guard the network",
                host,
            )

    code = run_daemon(command, start, drain_seconds=settings.daemon.drain_s)
    logs.flush()
    return code


def _check_together(command: str, settings: ServiceSettings) -> None:
    """Raises InvalidSetting for settings that do not fit together, before a port is bound or a file is made."""
    shared, listed = settings.daemon.metadata, settings.daemon.bookies
    if command == "autorecovery" and not shared:
        raise InvalidSetting("autorecovery needs the metadata of its cluster: --metadata zk://host:port/root")
    if shared:
        from magnetar.metadata.zookeeper.address import parse_address

        parse_address(shared)
    if command == "standalone":
        check_bookie_count(settings, 1, "standalone has one of its own")
    if command != "broker":
        return
    if shared and listed:
        raise InvalidSetting(
            "--metadata and --bookies exclude each other: bookies that share the metadata register themselves"
        )
    if not shared and not listed:
        raise InvalidSetting(
            "a broker needs bookies: --metadata zk://host:port/root of its cluster, or --bookies host:port,... (start them "
            "with `magnetar bookie`, or run `magnetar standalone`)"
        )
    if listed:
        check_bookie_count(settings, len(parse_bookies(listed)), "--bookies")


def _check_alone(settings: ServiceSettings) -> None:
    """A second instance on the same data says so, and not that the ports of the first one are taken. DataDirectoryError."""
    from magnetar.runtime.files import OsFiles

    files = OsFiles()
    if files.exists(settings.lock_path):
        files.lock(settings.lock_path).release()


def notify_supervisor(address: str, state: str) -> None:
    """A word to who started this process: the protocol sd_notify of systemd, a datagram to NOTIFY_SOCKET.

    READY=1: `systemctl start` returns now, and units that come after this one are started. STOPPING=1: it was asked to stop.
    Does nothing when `address` is empty, or nobody listens there: the supervisor has a time limit of its own.
    """
    if not address.startswith(("/", "@")):
        return
    name = "\0" + address[1:] if address[0] == "@" else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), name)


async def _stopping(supervisor: str) -> None:
    notify_supervisor(supervisor, "STOPPING=1")


def _note_http_address(bookie: Bookie, address: Address) -> None:
    """Where the bookie answers `magnetar bookie ...`: DATA/http-address (FORMATS.md), replaced durably.

    It may be an earlier daemon's: whoever asks there compares the instance that answers with the cookie in the directory.
    That it cannot be written, on a full disk say, is a warning.
    """
    host, port = address
    text = f"{format_host(_ANY_HOST.get(host, host))}:{port}\n"
    try:
        bookie.components.files.write_atomically(bookie.layout.http_address, text.encode())
    except MagnetarError as error:
        _log.warning(
            "`magnetar bookie ...` needs --bookie %s while this bookie runs: %s", text.strip(), error
        )


def _with_ports(settings: ServiceSettings, command: str, http_port: int) -> ServiceSettings:
    """Port 0 of a broker becomes a free one, and HTTP has its port, before they are needed in what look-ups answer.

    Nobody asked for the default port of Pulsar's protocol: where something listens there, a Pulsar say, all else is served.
    """
    daemon, broker = settings.daemon, settings.broker
    host = format_host(daemon.host_for_clients)
    if not daemon.http_port:
        broker = replace(broker, http_url=f"http://{host}:{http_port}")
    if not daemon.port and command in ("standalone", "broker"):
        with socket.create_server((daemon.host, 0)) as probe:
            daemon = replace(daemon, port=probe.getsockname()[1])
        broker = replace(broker, service_url=f"magnetar://{host}:{daemon.port}")
    if broker.pulsar_port and not settings.pulsar_port_given and command in ("standalone", "broker"):
        try:
            socket.create_server((daemon.host, broker.pulsar_port)).close()
        except OSError as error:
            taken = listen_error(
                error, daemon.host, broker.pulsar_port, "broker.pulsar_port", "--pulsar-port"
            )
            _log.warning("clients of Pulsar cannot connect here: %s", taken.message)
            broker = replace(broker, pulsar_port=0)
    return replace(settings, daemon=daemon, broker=broker)
