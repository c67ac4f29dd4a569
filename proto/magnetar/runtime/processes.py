"""Lean helper processes: the bookie's journal writer and disk worker, the broker's reader of archives.

A helper is one Python file that imports next to nothing (about 9 MB resident), started as `python -I -S FILE ARGUMENTS`. One
that needs libraries gets the paths where they are among its arguments.
Two pipes show each side the end of the other, whatever ended it:

    daemon  --- life line: the helper's standard input ------->  helper   reads EOF when the daemon has ended
    daemon  <-- death_fd: a pipe that only the helper holds ----  helper   EOF when the helper has ended

So a helper must watch descriptor 0 and end when it reads EOF (after finishing what it has to), must read nothing else
from it, and must start no process that inherits its descriptors. Helpers have a session of their own: Ctrl-C at the terminal
reaches the daemon only, which still needs its journal writer to drain.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from magnetar.proto.errors import StorageFailed

_log = logging.getLogger(__name__)
_REAP_RETRY_S = 0.001
# After SIGKILL.
KILL_TIMEOUT_S = 10.0
# Killed, and not ended yet: reaped when the next helper starts, or by init when this process ends.
_left: list[subprocess.Popen[bytes]] = []


def spawn_helper(
    script: str,
    arguments: Sequence[str],
    pass_fds: Sequence[int],
    environment: Mapping[str, str] | None = None,
) -> HelperProcess:
    """Starts the Python file `script`; descriptors keep their numbers, so pass them in `arguments`.

    `environment`: the helper's; without it, the helper has of the daemon's only what finds the interpreter's libraries. Its
    standard error is the daemon's. Raises StorageFailed when the process cannot be started.
    """
    _left[:] = [process for process in _left if process.poll() is None]
    lifeline_read, lifeline_write = os.pipe()
    death_read, death_write = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, *arguments],
            stdin=lifeline_read,
            stdout=subprocess.DEVNULL,
            pass_fds=[*pass_fds, death_write],
            start_new_session=True,
            env=environment
            or {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ},
        )
    except OSError as error:
        os.close(lifeline_write)
        os.close(death_read)
        raise StorageFailed(f"cannot start the helper process {script}: {error.strerror}") from error
    finally:
        os.close(lifeline_read)
        os.close(death_write)
    os.set_blocking(death_read, False)
    return HelperProcess(process, lifeline_write, death_read)


class HelperProcess:
    """A running helper. The owner closes it with `stop` or `close`; nothing else ends it while the daemon lives."""

    def __init__(self, process: subprocess.Popen[bytes], lifeline_fd: int, death_fd: int) -> None:
        self.pid = process.pid
        # Readable (EOF) once the helper has ended; -1 after `close`.
        self.death_fd = death_fd
        self._process = process
        self._lifeline_fd = lifeline_fd
        self._timer: asyncio.TimerHandle | None = None
        self._exit: asyncio.Future[int] | None = None  # from the first time on when somebody wants to know

    @property
    def returncode(self) -> int | None:
        """Exit code, the negative signal number, or None while it runs (or has not been reaped)."""
        return self._process.returncode

    def on_exit(self, callback: Callable[[int], None]) -> None:
        """Calls `callback(returncode)` once from the running loop when the helper ends, however it ends, before `close`."""
        self._ended().add_done_callback(lambda ended: callback(ended.result()))

    def kill(self) -> None:
        """Sends SIGKILL, unless it has ended."""
        self._process.kill()

    def hang_up(self) -> None:
        """Closes the life line: the helper finishes what it has and ends."""
        if self._lifeline_fd >= 0:
            os.close(self._lifeline_fd)
            self._lifeline_fd = -1

    async def wait(self) -> int:
        """Waits for the end and returns the exit code."""
        return await asyncio.shield(self._ended())

    async def stop(self, timeout_s: float) -> int:
        """Hangs up and waits; after `timeout_s` kills. Returns the exit code, and the helper is closed then.

        One that not even SIGKILL ends within `KILL_TIMEOUT_S` (its disk hangs in the kernel) is left to itself: -SIGKILL.
        """
        self.hang_up()
        try:
            return await asyncio.wait_for(self.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            try:
                return await asyncio.wait_for(self.wait(), KILL_TIMEOUT_S)
            except TimeoutError:
                _log.error("the helper process %d does not end by SIGKILL; it is left to itself", self.pid)
                return -signal.SIGKILL
        finally:
            self.close()

    def close(self) -> None:
        """Stops watching, hangs up and kills what still runs, without waiting for its end. May be called twice."""
        self.hang_up()
        self._unwatch()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._process.poll() is None:
            self._process.kill()
            _left.append(self._process)
        if self.death_fd >= 0:
            os.close(self.death_fd)
            self.death_fd = -1

    def _ended(self) -> asyncio.Future[int]:
        if self._exit is None:
            loop = asyncio.get_running_loop()
            self._exit = loop.create_future()
            if self._process.returncode is None:
                loop.add_reader(self.death_fd, self._reap)
            else:
                self._exit.set_result(self._process.returncode)
        return self._exit

    def _unwatch(self) -> None:
        if self._exit is not None and self.death_fd >= 0 and not self._exit.get_loop().is_closed():
            self._exit.get_loop().remove_reader(self.death_fd)

    def _reap(self) -> None:
        """The pipe breaks a moment before the process can be waited for: try until it can."""
        assert self._exit is not None
        self._unwatch()
        code = self._process.poll()
        if code is None:
            self._timer = self._exit.get_loop().call_later(_REAP_RETRY_S, self._reap)
        else:
            self._exit.set_result(code)
