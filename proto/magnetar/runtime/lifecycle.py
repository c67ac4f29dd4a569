"""The life of a daemon: start in order, ready, drain and stop in reverse order, or stop dead.

    starting --start() returned--> ready --SIGTERM or SIGINT--> stopping --all stopped--> exit 0
       |                             |                             |
       | error: one message,         | fail(error): one message,   | the same signal again: exit 128 + signal at once
       | stop what runs, exit 1      | exit 70 at once, no drain   |
       | (78 for a wrong setting)    | (rule 4: acknowledge nothing more)

SIGTERM after SIGINT is no second request: a terminal sends the one to all of a process group, and the supervisor in that
group passes on the other. Signals that come when all has stopped are ignored; the process then ends within seconds, even
if a disk holds one of its threads.

`start` makes the components one after another and registers how each is stopped as soon as it runs:

    async def start(daemon: Daemon) -> None:
        bookie = await open_bookie(settings, components)
        bookie.on_failure = daemon.fail
        daemon.on_stop("bookie", bookie.close)

    sys.exit(run_daemon("standalone", start, drain_seconds=10))
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from magnetar.proto.errors import InvalidSetting, MagnetarError
from magnetar.runtime.collection import FreezeInSteps
from magnetar.runtime.tasks import awaited

EXIT_STOP_FAILED = 1
EXIT_FAILED = 70  # EX_SOFTWARE: a component failed; the supervisor restarts us, and we recover
EXIT_CONFIG = 78  # EX_CONFIG: an operator must act; restarting does not help
_EXIT_S = 5.0  # from the end of the last component to that of the process
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = logging.getLogger("magnetar.lifecycle")


class Daemon:
    """One run. `state` is "starting", "ready" or "stopping"."""

    def __init__(
        self,
        name: str,
        *,
        drain_seconds: float = 10.0,
        exit_now: Callable[[int], object] = os._exit,
    ) -> None:
        self.name = name
        self.state = "starting"
        self.failure = ""  # why it stops at once: for /health/live, should the exit take its time
        self.drain_seconds = drain_seconds
        self._exit_now = exit_now
        self._stops: list[tuple[str, Callable[[], Awaitable[object]]]] = []
        self._stop_asked: asyncio.Event = asyncio.Event()
        self._collections = FreezeInSteps()
        self._signals: set[signal.Signals] = set()  # those that have come

    @property
    def ready(self) -> bool:
        """True between start and stop."""
        return self.state == "ready"

    def on_stop(self, name: str, stop: Callable[[], Awaitable[object]]) -> None:
        """Registers how a component that now runs is stopped; the last registered stops first."""
        self._stops.append((name, stop))

    def fail(self, error: MagnetarError) -> None:
        """Fail-stop: exits with code 70 before anything else happens. Nothing is drained or acknowledged any more."""
        self.failure = f"{type(error).__name__}: {error.message}"
        _log.critical("%s stops: %s", self.name, self.failure)
        _flush_logs()
        self._exit_now(EXIT_FAILED)

    def stop(self) -> None:
        """Asks for a clean stop, as the first SIGTERM does. A second call does nothing."""
        self._stop_asked.set()

    async def run(self, start: Callable[[Daemon], Coroutine[Any, Any, object]]) -> int:
        """Runs until a signal or `stop`; returns the exit code. Every component has been stopped then."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        try:
            code = await self._start(start)
            if code is None:
                await self._stop_asked.wait()
                code = 0
            self.state = "stopping"
            return await self._stop_all() or code
        finally:
            self._collections.end()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)

    async def _start(self, start: Callable[[Daemon], Coroutine[Any, Any, object]]) -> int | None:
        """None when ready, else the exit code."""
        starting = awaited(start(self), "start")
        asked = awaited(self._stop_asked.wait(), "stop")
        await asyncio.wait([starting, asked], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
        asked.cancel()
        try:
            await starting
        except asyncio.CancelledError:
            return 0
        except MagnetarError as error:
            _log.critical("%s cannot start: %s", self.name, error.message)
            return EXIT_CONFIG if isinstance(error, InvalidSetting) else EXIT_STOP_FAILED
        except Exception:
            _log.critical("%s cannot start", self.name, exc_info=True)
            return EXIT_FAILED
        self._collections.begin()
        if not self._stop_asked.is_set():
            self.state = "ready"
        return None

    async def _stop_all(self) -> int:
        """Stops in reverse order within `drain_seconds` in total; what does not stop in time is left to the exit."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.drain_seconds
        code = 0
        while self._stops:
            name, stop = self._stops.pop()
            limit = asyncio.timeout(max(deadline - loop.time(), 0.1))
            try:
                async with limit:
                    await stop()
            except Exception:
                code = EXIT_STOP_FAILED
                if limit.expired():
                    _log.error("%s did not stop within the drain time of %g s", name, self.drain_seconds)
                else:
                    _log.exception("stopping %s failed", name)
        return code

    def _signalled(self, number: signal.Signals) -> None:
        if number in self._signals:
            _log.warning("%s: second %s, stopping at once", self.name, number.name)
            _flush_logs()
            self._exit_now(128 + number)
            return
        self._signals.add(number)
        _log.info("%s: %s, draining for %g s at most", self.name, number.name, self.drain_seconds)
        self._stop_asked.set()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it is installed, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def run_daemon(
    name: str, start: Callable[[Daemon], Coroutine[Any, Any, object]], *, drain_seconds: float = 10.0
) -> int:
    """Runs a daemon on a new event loop in the main thread; returns the exit code."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        code = runner.run(Daemon(name, drain_seconds=drain_seconds).run(start))
        # From here on threads are joined, and one that a hung disk holds would never let the process end.
        exit_at_last = threading.Timer(_EXIT_S, _exit_now, (name, code))
        exit_at_last.daemon = True
        exit_at_last.start()
        return code


def _exit_now(name: str, code: int) -> None:
    _log.error("%s: a thread still waits for its disk; the process ends without it", name)
    _flush_logs()
    os._exit(code)


def _flush_logs() -> None:
    for handler in logging.getLogger().handlers:
        with contextlib.suppress(Exception):
            handler.flush()
    with contextlib.suppress(Exception):
        sys.stderr.flush()
