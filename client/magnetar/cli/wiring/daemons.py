"""The daemons as processes: settings, event loop, logs, the ready line, metrics, signals, exit codes.

    magnetar standalone is ready: magnetar://127.0.0.1:7650 bookie://127.0.0.1:3181 http://127.0.0.1:8080 data=/srv/data

is the one line on standard output; logs go to standard error. Exit codes: 0 stopped by a signal, 1 cannot start, 2 wrong
command line, 70 a component failed (start it again: it recovers), 78 a wrong setting.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from magnetar.proto.errors import InvalidSetting, ServiceNotReady
from magnetar.runtime.allocator import keep_large_buffers
from magnetar.runtime.lifecycle import EXIT_CONFIG, Daemon, run_daemon

from .bookie_address import note_http_address
from .flags import UsageError, parse_flags
from .health import HttpPages, Started, bookie_reasons, broker_reasons
from .lazy_imports import LazyHttp, LazyLogs
from .settings import ServiceSettings, SettingSources, check_bookie_count, format_host, service_settings
from .supervisor import notify_supervisor

if TYPE_CHECKING:
    from magnetar.bookie import Bookie
    from magnetar.runtime.http import Command

    from .standalone import Address

_log = logging.getLogger(__name__)

EXIT_USAGE = 2

Starter = Callable[[ServiceSettings, Daemon, AsyncExitStack], Awaitable[Started]]


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
    starter = _STARTERS[command]
    data = os.path.abspath(settings.daemon.data)

    async def start(daemon: Daemon) -> None:
        pages = HttpPages(daemon, _bookie_commands)
        host = settings.daemon.host
        # From now on probes are answered: a bookie that replays for a minute is alive, and not ready.
        try:
            http = LazyHttp.bind(
                host,
                settings.daemon.http_port,
                pages,
                imports=("magnetar.bookie.shell",) if command in ("standalone", "bookie") else (),
            )
        except ServiceNotReady:
            _check_alone(settings)
            raise
        daemon.on_stop("http", http.close)
        supervisor = os.environ.get("NOTIFY_SOCKET", "")
        stops = AsyncExitStack()
        daemon.on_stop(command, stops.aclose)
        started = pages.started = await starter(settings, daemon, stops)
        if started.bookie is not None:
            note_http_address(started.bookie, http.address)
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


async def _stopping(supervisor: str) -> None:
    notify_supervisor(supervisor, "STOPPING=1")


def _bookie_commands(bookie: Bookie) -> Mapping[tuple[str, str], Command]:
    """For `magnetar bookie ...` (WIRE.md, HTTP of a bookie)."""
    from magnetar.bookie.shell import BookieShell

    shell = BookieShell(bookie)
    commands: dict[tuple[str, str], Command] = {}
    for method, named in (("GET", shell.queries()), ("POST", shell.changes())):
        commands |= {(method, f"/bookie/{name}"): command for name, command in named.items()}
    return commands


async def _start_standalone(settings: ServiceSettings, daemon: Daemon, stops: AsyncExitStack) -> Started:
    from magnetar.bookie.status import bookie_problems

    from .components import service_components
    from .metrics import service_metrics
    from .standalone import Standalone

    settings = _with_ports(settings)
    standalone = Standalone(settings, service_components(), on_failure=daemon.fail)
    addresses = await standalone.start()
    stops.push_async_callback(standalone.close)
    bookie = standalone.bookie
    assert bookie is not None
    return Started(
        {"magnetar": addresses.broker, "bookie": addresses.bookie},
        lambda: service_metrics(standalone.broker, bookie),
        lambda: {**bookie_problems(bookie), **(standalone.broker.problems() if standalone.broker else {})},
        lambda: bookie_reasons(bookie),
        bookie,
    )


async def _start_bookie(settings: ServiceSettings, daemon: Daemon, stops: AsyncExitStack) -> Started:
    from magnetar.bookie.status import bookie_problems
    from magnetar.runtime.files import OsFiles

    from .components import bookie_components
    from .metrics import service_metrics
    from .shared_metadata import run_bookie
    from .standalone import lock_data, serve_bookie, start_bookie

    if settings.daemon.metadata:
        return await run_bookie(settings, daemon.fail, stops)
    lock_data(OsFiles(), settings, stops)
    bookie = await start_bookie(settings, bookie_components(), daemon.fail, stops)
    server = await serve_bookie(bookie, settings, stops)
    return Started(
        {"bookie": server.addresses[0]},
        lambda: service_metrics(None, bookie),
        lambda: bookie_problems(bookie),
        lambda: bookie_reasons(bookie),
        bookie,
    )


async def _start_broker(settings: ServiceSettings, daemon: Daemon, stops: AsyncExitStack) -> Started:
    from .shared_metadata import run_broker

    settings = _with_ports(settings)
    if settings.daemon.metadata:
        return await run_broker(settings, stops)
    return await _run_broker_alone(settings, daemon, stops)


async def _run_broker_alone(settings: ServiceSettings, daemon: Daemon, stops: AsyncExitStack) -> Started:
    """A broker with a store of its own and a list of bookies."""
    from magnetar.ledger import BookieInfoReader, StaticBookies

    from .components import broker_components
    from .metrics import service_metrics
    from .standalone import connect_bookies, lock_data, open_metadata, start_broker

    components = broker_components()
    lock_data(components.files, settings, stops)
    metadata = open_metadata(components, settings, daemon.fail, stops)
    directory = StaticBookies(parse_bookies(settings.daemon.bookies))
    transport = await connect_bookies(directory, settings, components, metadata, "broker", stops)
    info_reader = BookieInfoReader(directory, transport, settings.ledger, components.rng)
    stops.push_async_callback(info_reader.close)
    await info_reader.start()
    broker, server = await start_broker(
        settings, components, metadata, transport, directory, stops, remember_deletions=True
    )
    return Started(
        {"magnetar": server.addresses[0]},
        lambda: service_metrics(broker, None),
        lambda: {**info_reader.problems(), **broker.problems()},
        lambda: broker_reasons(settings, len(directory.writable())),
    )


async def _start_autorecovery(settings: ServiceSettings, daemon: Daemon, stops: AsyncExitStack) -> Started:
    from .shared_metadata import run_autorecovery

    return await run_autorecovery(settings, stops)


_STARTERS: dict[str, Starter] = {
    "standalone": _start_standalone,
    "bookie": _start_bookie,
    "broker": _start_broker,
    "autorecovery": _start_autorecovery,
}


def parse_bookies(texts: Sequence[str]) -> dict[str, Address]:
    """`host:port`, which is then the id as well, or `id=host:port`. Raises InvalidSetting."""
    from magnetar.ledger.directory import parse_address

    bookies: dict[str, Address] = {}
    for text in texts:
        name, equals, address = text.partition("=")
        if name in bookies:
            raise InvalidSetting(f"bookie {name} is listed twice in --bookies; name each once")
        bookies[name] = parse_address(address if equals else text)
    return bookies


def _with_ports(settings: ServiceSettings) -> ServiceSettings:
    """Port 0 of the broker becomes a free one before it is needed in what look-ups answer."""
    if settings.daemon.port:
        return settings
    import socket

    with socket.create_server((settings.daemon.host, 0)) as probe:
        port = probe.getsockname()[1]
    url = f"magnetar://{format_host(settings.daemon.host_for_clients)}:{port}"
    return replace(
        settings,
        daemon=replace(settings.daemon, port=port),
        broker=replace(settings.broker, service_url=url),
    )
