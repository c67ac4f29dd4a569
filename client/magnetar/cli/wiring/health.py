"""What HTTP tells of a daemon, from before its start to the end of its stop.

    GET /health/live     200 as long as the event loop turns, which answers it, and no component has failed; else restart it
    GET /health/ready    200 when it should get traffic; 503 with the reasons when not, and a restart does not help

                     starting        ready                              stopping
    bookie           replays         registered, and its journal syncs  closes its ledgers
    broker           looks around    its session holds, it is not       hands over its topics
                                     drained, enough bookies take entries
    autorecovery     looks around    its session holds                  gives its locks back

A bookie that is read-only is ready, and says so among the notes: it serves what it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from magnetar.runtime.imports import import_in_thread
from magnetar.runtime.tasks import long_tasks

from .settings import ServiceSettings

if TYPE_CHECKING:
    from magnetar.bookie import Bookie
    from magnetar.broker import Broker
    from magnetar.ledger.replication.auto_recovery import AutoRecovery
    from magnetar.runtime.http import Command, Handler
    from magnetar.runtime.lifecycle import Daemon
    from magnetar.runtime.metrics import Metrics, Read

    from .service import Address


Reasons = Mapping[str, str]
_FIGURES = re.compile(r"\b\d[\d.,:]*\b")


class Started(NamedTuple):
    """A daemon that runs: where it listens, its metrics, and what HTTP tells of it."""

    addresses: dict[str, Address]
    metrics: Callable[[], Metrics]
    # What an operator should know although it works.
    warnings: Callable[[], Reasons] = dict
    # Why it should get no traffic, by a name of each reason; empty: it is ready.
    reasons: Callable[[], Reasons] = dict
    # The bookie in this process, which answers `magnetar bookie ...` over HTTP.
    bookie: Bookie | None = None
    # The broker, whose administration is there as well.
    broker: Broker | None = None


class HttpPages:
    """The answers of one daemon's HTTP server; `started` is given once it runs."""

    def __init__(self, daemon: Daemon) -> None:
        self.started: Started | None = None
        self._daemon = daemon
        self._metrics: Metrics | None = None
        self._commands: dict[tuple[str, str], Command] = {}
        self._handler: Handler | None = None

    def failure(self) -> str:
        """Why the process should be started anew; "" while it works."""
        return self._daemon.failure

    def reasons(self) -> Reasons:
        """Why no traffic should be sent to it."""
        if self._daemon.state == "stopping":
            return {"stopping": "it was asked to stop, and hands over what it serves"}
        started = self._running
        if started is None:
            return {"starting": "it recovers what its disks hold, and looks for the others of its cluster"}
        return started.reasons()

    def warnings(self) -> Reasons:
        """What an operator should know."""
        started = self._running
        if started is None:
            return {}
        ended = {task.name: task.trouble for task in long_tasks() if task.trouble}
        return {
            **started.warnings(),
            **{name: f"it has ended, and begins anew: {reason}" for name, reason in ended.items()},
        }

    def metrics(self) -> Metrics | None:
        """None while it starts or stops: its parts are not all there."""
        started = self._running
        if started is None:
            return None
        if self._metrics is None:
            from magnetar.runtime.metrics import Family

            self._metrics = started.metrics()
            degraded = (
                "1 while /health names a reason of trouble, of this daemon or of its cluster; 0: all is well"
            )
            problem = "1 for each reason of trouble that /health names, N in the place of its figures"
            self._metrics.observe_all(
                {"degraded": Family(degraded), "problem": Family(problem, ("subject", "reason"))},
                self._problem_metrics,
            )
        return self._metrics

    def commands(self) -> Mapping[tuple[str, str], Command]:
        """For `magnetar bookie ...`, by method and path (WIRE.md, HTTP of a bookie)."""
        started = self._running
        if started is None or started.bookie is None:
            return {}
        if not self._commands:
            from magnetar.bookie.shell import BookieShell

            shell = BookieShell(started.bookie)
            for method, named in (("GET", shell.queries()), ("POST", shell.changes())):
                self._commands |= {(method, f"/bookie/{name}"): command for name, command in named.items()}
        return self._commands

    async def handler(self) -> Handler | None:
        """The administration of the broker in this process, unless that starts or stops."""
        started = self._running
        if started is None:
            from aiohttp import web

            raise web.HTTPServiceUnavailable(text="the daemon starts or stops; try again")
        if started.broker is None:
            return None
        if self._handler is None:
            await import_in_thread("magnetar.broker.listeners.http.server", "magnetar.gateway.gateway")
            from magnetar.broker.listeners.http.server import AdminServer
            from magnetar.gateway.gateway import Gateway

            settings = started.broker.settings
            gateway = Gateway(settings.service_url, settings.name, settings.max_message_bytes)
            self._daemon.on_stop("programs without a client", gateway.close)
            self._handler = AdminServer(started.broker, gateway.handle).handle
        return self._handler

    def _problem_metrics(self) -> dict[str, Read]:
        """Without the figures of the reasons: each value of a label is a series of its own."""
        problems = {**self.warnings(), **self.reasons()}
        rows = [([subject, _FIGURES.sub("N", reason)], 1) for subject, reason in problems.items()]
        return {"degraded": float(bool(rows)), "problem": rows}

    @property
    def _running(self) -> Started | None:
        return self.started if self._daemon.ready else None


def bookie_reasons(bookie: Bookie, registered: bool = True) -> Reasons:
    """A bookie without a cluster is never registered, and needs not to be."""
    from magnetar.bookie.status import bookie_problems

    reasons = {}
    if not registered:
        reasons["unregistered"] = (
            "it has no session with the metadata store, so nobody finds it; it goes on trying"
        )
    if stalled := bookie_problems(bookie).get("journal_stalled"):
        reasons["journal_stalled"] = stalled
    return reasons


def broker_reasons(
    settings: ServiceSettings, writable: int, *, session: bool = True, state: str = "ready"
) -> Reasons:
    """`writable`: how many bookies take entries. `session`: its own one holds. `state`: as registered."""
    reasons = {}
    if not session:
        reasons["session"] = (
            "it has no session with the metadata store, so others may own its topics; it goes on trying"
        )
    if state != "ready":
        reasons[state] = f"it is {state}: others get its topics"
    if lack := settings.broker.lack_of_bookies(writable):
        reasons["bookies"] = lack
    return reasons


def autorecovery_reasons(repairs: AutoRecovery) -> Reasons:
    """Without a session no ledger is repaired."""
    if repairs.trouble:
        return {"repair": f"it repairs nothing, and begins anew in a moment: {repairs.trouble}"}
    if repairs.has_session:
        return {}
    return {"session": "it has no session with the metadata store, so it repairs nothing; it goes on trying"}
