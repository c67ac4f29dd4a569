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
from pathlib import Path

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

    daemon = Daemon("test")
    running = asyncio.ensure_future(daemon.run(start))
    while not daemon.ready:
        await asyncio.sleep(0.001)
    assert gc.get_freeze_count() > 1000
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    assert events == ["http", "broker", "bookie"]
    assert daemon.state == "stopping"


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_the_same_signal_again_stops_at_once_and_another_one_does_not(first: signal.Signals) -> None:
    """A terminal interrupts its process group, and the supervisor in that group sends SIGTERM for the same reason."""
    codes: list[int] = []
    daemon = Daemon("test", drain_seconds=60, exit_now=codes.append)
    stuck, draining = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        draining.set()
        await stuck.wait()

    async def start(daemon: Daemon) -> None:
        daemon.on_stop("stuck", drain)
        os.kill(os.getpid(), first)

    running = asyncio.ensure_future(daemon.run(start))
    await draining.wait()
    (other,) = {signal.SIGTERM, signal.SIGINT} - {first}
    os.kill(os.getpid(), other)
    while other not in daemon._signals and not codes:
        await asyncio.sleep(0.001)
    assert codes == []
    os.kill(os.getpid(), first)
    while not codes:
        await asyncio.sleep(0.001)
    assert codes == [128 + first]
    stuck.set()
    assert await running == 0
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)  # there is nothing left to stop: the process goes on to its exit code


@pytest.mark.real
async def test_an_interrupt_before_the_start_leaves_no_traceback(tmp_path: Path) -> None:
    """Regression: while it imported what it needs, Ctrl-C of a daemon printed a KeyboardInterrupt."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'magnetar.cli.wiring.daemons': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "magnetar.cli.main", "broker"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


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


@pytest.mark.real
async def test_rule_45_a_thread_that_a_disk_holds_does_not_keep_the_process() -> None:
    program = (
        "import asyncio, sys, threading\n"
        "from magnetar.runtime import lifecycle\n"
        "lifecycle._EXIT_S = 0.2\n"
        "async def start(daemon):\n"
        "    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)\n"
        "    daemon.stop()\n"
        "sys.exit(lifecycle.run_daemon('bookie', start))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=140
    )
    assert done.returncode == 0
    assert "the process ends without it" in done.stderr


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
