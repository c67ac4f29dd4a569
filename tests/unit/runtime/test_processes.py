"""Helper processes: lean, and each side learns of the other's end."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from magnetar.proto.errors import StorageFailed
from magnetar.runtime import processes
from magnetar.runtime.processes import HelperProcess, spawn_helper

pytestmark = [pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"]), pytest.mark.real]

HELPER = """
import os, sys
out = int(sys.argv[1])
os.write(out, str(sorted(m for m in sys.modules if m in ("site", "asyncio", "magnetar", "re"))).encode())
os.read(0, 1)      # EOF: the daemon is gone or hung up
sys.exit(7)
"""


def spawn(tmp_path: Path, text: str = HELPER) -> tuple[HelperProcess, int]:
    script = tmp_path / "helper.py"
    script.write_text(text)
    read_fd, write_fd = os.pipe()
    helper = spawn_helper(str(script), [str(write_fd)], [write_fd])
    os.close(write_fd)
    return helper, read_fd


async def test_a_helper_is_lean_and_ends_when_hung_up(tmp_path: Path) -> None:
    helper, read_fd = spawn(tmp_path)
    assert os.read(read_fd, 1000) == b"[]"
    assert await helper.stop(10) == 7
    assert helper.death_fd == -1
    os.close(read_fd)


async def test_death_is_reported_once(tmp_path: Path) -> None:
    helper, read_fd = spawn(tmp_path)
    codes: list[int] = []
    helper.on_exit(codes.append)
    helper.on_exit(codes.append)
    os.read(read_fd, 1000)
    helper.kill()
    assert await helper.wait() == -9
    assert codes == [-9, -9]
    assert await helper.wait() == -9
    helper.close()
    helper.close()
    os.close(read_fd)


async def test_a_helper_that_does_not_end_is_killed(tmp_path: Path) -> None:
    text = "import os, sys, time\nos.write(int(sys.argv[1]), b'x')\ntime.sleep(60)"
    helper, read_fd = spawn(tmp_path, text)
    os.read(read_fd, 1)
    assert await helper.stop(0.05) == -signal.SIGKILL
    os.close(read_fd)


async def test_a_helper_notices_that_its_daemon_was_killed(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text(HELPER)
    daemon = (
        "import os, signal, sys\n"
        "from magnetar.runtime.processes import spawn_helper\n"
        "spawn_helper(sys.argv[1], [sys.argv[2]], [int(sys.argv[2])])\n"
        "signal.pause()\n"
    )
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", daemon, str(tmp_path / "helper.py"), str(write_fd)], pass_fds=[write_fd]
    )
    os.close(write_fd)
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(None, os.read, read_fd, 1000)
    process.kill()
    process.wait()
    # EOF: the last process that held the pipe is gone.
    async with asyncio.timeout(10):
        assert await loop.run_in_executor(None, os.read, read_fd, 1000) == b""
    os.close(read_fd)


async def test_an_interpreter_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc") else 0
    with pytest.raises(StorageFailed, match="cannot start"):
        spawn_helper("x.py", [], [])
    assert not before or len(os.listdir("/proc/self/fd")) == before


async def test_rule_46_a_helper_that_sigkill_does_not_end_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one whose disk hangs in the kernel: SIGKILL stays pending, and it can neither be reaped nor waited for."""
    monkeypatch.setattr(processes, "KILL_TIMEOUT_S", 0.05)
    text = "import os, sys, time\nos.write(int(sys.argv[1]), b'x')\ntime.sleep(60)"
    helper, read_fd = spawn(tmp_path, text)
    os.read(read_fd, 1)
    process = helper._process
    with monkeypatch.context() as patched:
        patched.setattr(process, "kill", lambda: None)
        patched.setattr(process, "send_signal", lambda _number: None)
        patched.setattr(process, "wait", lambda: pytest.fail("the loop waits for a process"))
        async with asyncio.timeout(20):
            assert await helper.stop(0.05) == -signal.SIGKILL
    assert f"{helper.pid} does not end by SIGKILL" in caplog.text
    process.kill()
    process.wait()
    os.close(read_fd)


async def test_rule_46_a_stop_that_is_cancelled_does_not_wait_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os, sys, time\nos.write(int(sys.argv[1]), b'x')\ntime.sleep(60)"
    helper, read_fd = spawn(tmp_path, text)
    os.read(read_fd, 1)
    process = helper._process
    with monkeypatch.context() as patched:
        patched.setattr(process, "wait", lambda: pytest.fail("the loop waits for a process"))
        stopping = asyncio.create_task(helper.stop(60))
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
    assert process.wait() == -signal.SIGKILL
    os.close(read_fd)
