"""The life of a daemon: order, signals, fail-stop; and what a thin client must not load."""

import asyncio
import gc
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator

import pytest

from magnetar.proto.errors import InvalidSetting, ServiceNotReady, StorageFailed
from magnetar.runtime.lifecycle import EXIT_CONFIG, EXIT_FAILED, Daemon

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


def noting(events: list[str], name: str) -> Callable[[], Awaitable[None]]:
    async def stop() -> None:
        events.append(name)

    return stop


async def test_components_stop_in_reverse_order_on_sigterm() -> None:
    events: list[str] = []

    async def start(daemon: Daemon) -> None:
        assert daemon.state == "starting"
        for name in ("bookie", "broker", "http"):
            daemon.on_stop(name, noting(events, name))
        asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), signal.SIGTERM)

    daemon = Daemon("test")
    running = asyncio.ensure_future(daemon.run(start))
    while not daemon.ready:
        await asyncio.sleep(0.001)
    assert gc.get_freeze_count() > 1000
    assert await running == 0
    assert events == ["http", "broker", "bookie"]
    assert daemon.state == "stopping"


async def test_a_second_signal_stops_at_once() -> None:
    codes: list[int] = []
    daemon = Daemon("test", drain_seconds=5, exit_now=codes.append)
    stuck = asyncio.Event()

    async def drain() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await stuck.wait()

    async def start(daemon: Daemon) -> None:
        daemon.on_stop("stuck", drain)
        daemon.stop()

    running = asyncio.ensure_future(daemon.run(start))
    async with asyncio.timeout(5):
        while not codes:
            await asyncio.sleep(0.001)
    assert codes == [128 + signal.SIGTERM]
    stuck.set()
    await running


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InvalidSetting("port 7650 is in use"), EXIT_CONFIG, "cannot start: port 7650 is in use"),
        (ServiceNotReady("metadata is not there"), 1, "metadata is not there"),
        (ZeroDivisionError("bug"), EXIT_FAILED, "ZeroDivisionError"),
    ],
)
async def test_a_failed_start_stops_what_runs(
    error: Exception, code: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[str] = []

    async def start(daemon: Daemon) -> None:
        daemon.on_stop("bookie", noting(events, "bookie"))
        raise error

    assert await Daemon("test").run(start) == code
    assert events == ["bookie"]
    assert words in caplog.text
    assert len(caplog.records) == 1


async def test_a_signal_during_the_start_cancels_it() -> None:
    events: list[str] = []

    async def start(daemon: Daemon) -> None:
        daemon.on_stop("bookie", noting(events, "bookie"))
        daemon.stop()
        await asyncio.Event().wait()

    assert await Daemon("test").run(start) == 0
    assert events == ["bookie"]


async def test_a_component_that_hangs_or_fails_does_not_keep_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events: list[str] = []

    async def hang() -> None:
        await asyncio.Event().wait()

    async def fail() -> None:
        raise ZeroDivisionError("bug")

    async def start(daemon: Daemon) -> None:
        daemon.on_stop("bookie", noting(events, "bookie"))
        daemon.on_stop("hangs", hang)
        daemon.on_stop("fails", fail)
        daemon.stop()

    assert await Daemon("test", drain_seconds=0.05).run(start) == 1
    assert events == ["bookie"]
    assert "hangs did not stop" in caplog.text
    assert "stopping fails failed" in caplog.text


@pytest.mark.real
async def test_rule_04_a_failure_ends_the_process_without_draining() -> None:
    program = (
        "import sys\n"
        "from magnetar.proto.errors import StorageFailed\n"
        "from magnetar.runtime.lifecycle import run_daemon\n"
        "async def drain(): print('drained', flush=True)\n"
        "async def start(daemon):\n"
        "    import asyncio\n"
        "    daemon.on_stop('x', drain)\n"
        "    asyncio.get_running_loop().call_soon(daemon.fail, StorageFailed('fsync of journal failed'))\n"
        "sys.exit(run_daemon('bookie', start))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == EXIT_FAILED
    assert done.stdout == ""
    assert done.stderr.strip() == "bookie stops: StorageFailed: fsync of journal failed"


async def test_failure_is_reported_once_and_exits_now(caplog: pytest.LogCaptureFixture) -> None:
    codes: list[int] = []
    daemon = Daemon("test", exit_now=codes.append)
    with caplog.at_level(logging.CRITICAL):
        daemon.fail(StorageFailed("disk"))
    assert codes == [70]
    assert caplog.messages == ["test stops: StorageFailed: disk"]


@pytest.mark.real
async def test_what_a_client_loads_has_no_server_library() -> None:
    program = (
        "import json, sys\n"
        "import magnetar.runtime, magnetar.runtime.connection, magnetar.runtime.files\n"
        "import magnetar.runtime.clock, magnetar.runtime.settings, magnetar.runtime.processes\n"
        "names = ('structlog', 'prometheus_client', 'aiohttp', 'rocksdict', 'typer', 'rich')\n"
        "print(json.dumps([name for name in names if name in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
