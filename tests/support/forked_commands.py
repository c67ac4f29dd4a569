"""`magnetar ...` as a process of its own that need not import anything: most commands import for longer than they work.

    done = run_magnetar("topics", "list", "--url", url)      # as subprocess.run(..., capture_output=True, text=True)
    ServiceProcess.spawn = staticmethod(spawn)               # daemons, too; tests/conftest.py does this

One process a test worker imports all that they may need, and waits on a socket:

    test ──module, arguments, environment, streams──> server ──fork──> keeper ──fork──> the command
      <──────────── process id, exit code ──────────────────────────────┘

The command has a process id, standard streams, signals and an exit of its own, so what a test sees is what a shell sees, but
for the imports. Those are tested where `subprocess` starts a command.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["FORKED", "ForkedProcess", "run_magnetar", "spawn"]

FORKED = "support.forked_commands"  # the audit event of a start
_TESTS = Path(__file__).parents[1]
_MOST_BYTES = 1 << 17  # of a request
_NUMBER = struct.Struct("<i")
_MODULES = ("magnetar.cli.main", "support.lossy.service")
_starting = threading.Lock()
_server: socket.socket | None = None


class ForkedProcess:
    """What tests use of `subprocess.Popen`. `streams` are descriptors of standard input, output and error."""

    def __init__(self, line: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]) -> None:
        """`line` is [PYTHON, "-m", MODULE, ARGUMENTS...]."""
        sys.audit(FORKED, *line)
        self.args = list(line)
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None
        request = {
            "module": line[2],
            "arguments": line[3:],
            "environment": dict(environment),
            "folder": os.getcwd(),
        }
        self._keeper, theirs = socket.socketpair()
        weakref.finalize(self, self._keeper.close)
        with theirs, _starting:
            socket.send_fds(_started(), [json.dumps(request).encode()], [theirs.fileno(), *streams])
        answer = self._keeper.recv(_NUMBER.size)
        assert answer, "the process that forks commands has ended"
        self.pid: int = _NUMBER.unpack(answer)[0]

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or minus the signal. subprocess.TimeoutExpired."""
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._keeper, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            answer = self._keeper.recv(_NUMBER.size, socket.MSG_PEEK)  # another thread may wait as well
            self.returncode = _NUMBER.unpack(answer)[0] if answer else -signal.SIGKILL
        return self.returncode

    def poll(self) -> int | None:
        """The same, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        """Does nothing once it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def spawn(line: Sequence[str], *, stdin: int, stdout: int, stderr: IO[bytes], env: Mapping[str, str]) -> Any:
    """For ServiceProcess: a ForkedProcess, or subprocess.Popen for what the server has not imported."""
    if stdin != subprocess.DEVNULL or stdout != subprocess.PIPE or not _forkable(line, env):
        return subprocess.Popen(line, stdin=stdin, stdout=stdout, stderr=stderr, env=env)
    reading, writing = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        process = ForkedProcess(line, env, (nothing, writing, stderr.fileno()))
    finally:
        os.close(nothing)
        os.close(writing)
    process.stdout = open(reading, "rb", buffering=0)  # noqa: SIM115 - closed by the owner, as that of a Popen
    return process


def run_magnetar(
    *arguments: str, stdin: bytes = b"", environment: Mapping[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Runs `magnetar ARGUMENTS` to its end. subprocess.TimeoutExpired when that does not come."""
    environment = dict(os.environ if environment is None else environment)
    line = [sys.executable, "-m", "magnetar.cli.main", *arguments]
    if not _forkable(line, environment):
        plain = subprocess.run(line, input=stdin, env=environment, capture_output=True, timeout=timeout)
        return subprocess.CompletedProcess(
            line, plain.returncode, plain.stdout.decode(), plain.stderr.decode()
        )
    (ask, given), (out, told), (errors, complained) = (os.pipe() for _ in range(3))
    try:
        process = ForkedProcess(line, environment, (ask, told, complained))
    finally:
        for number in (ask, told, complained):
            os.close(number)
    said, complaints = bytearray(), bytearray()
    threads = [
        threading.Thread(target=_write, args=(given, stdin)),
        threading.Thread(target=_read, args=(out, said)),
        threading.Thread(target=_read, args=(errors, complaints)),
    ]
    for thread in threads:
        thread.start()
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.wait()
        error.output, error.stderr = bytes(said), bytes(complaints)
        raise
    finally:
        for thread in threads:
            thread.join()
    return subprocess.CompletedProcess(line, code, said.decode(), complaints.decode())


def _write(pipe: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as file:
        file.write(data)


def _read(pipe: int, into: bytearray) -> None:
    with open(pipe, "rb") as file:
        into += file.read()


def _forkable(line: Sequence[str], environment: Mapping[str, str]) -> bool:
    """No coverage, which follows no forks; nothing that Python or the dynamic linker look at before `main`."""

    def early(variables: Mapping[str, str]) -> dict[str, str]:
        names = [name for name in variables if name.startswith(("COVERAGE_PROCESS", "LD_", "PYTHON"))]
        return {name: variables[name] for name in names if name != "PYTHONPATH"}

    known = environment.get("PYTHONPATH") in (os.environ.get("PYTHONPATH"), str(_TESTS))
    same = known and early(environment) == early(os.environ)
    covered = any(name.startswith("COVERAGE_PROCESS") for name in environment)
    return list(line[:2]) == [sys.executable, "-m"] and line[2] in _MODULES and same and not covered


def _started() -> socket.socket:
    """The socket of this process's server, which ends when the socket is closed."""
    global _server
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
        path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "support.forked_commands", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the tests, which end what they started
            ).returncode = 0  # nobody waits for it
        _server = ours
    return _server


# --- the server ----------------------------------------------------------------------------------------------------------


def _import_all() -> None:
    """What commands and daemons import, but for Spark and archives."""
    for root in ("proto", "runtime", "metadata", "ledger", "bookie", "broker", "client", "cli"):
        package = importlib.import_module(f"magnetar.{root}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not any(word in module.name for word in ("spark", "archive", "export", "__main__")):
                importlib.import_module(module.name)


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Empty when nobody can ask any more; the request in the process of each command."""
    while True:
        text, given, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # keepers that have ended
                pass
        if not text:
            return {}
        if os.fork() == 0:
            requests.close()
            return _keep(json.loads(text), given)
        for number in given:
            os.close(number)


def _keep(request: dict[str, Any], given: list[int]) -> dict[str, Any]:
    """Returns in the process of the command only."""
    pid = os.fork()
    if pid == 0:
        os.close(given[0])
        for number, stream in enumerate(given[1:]):
            os.dup2(stream, number)
            os.close(stream)
        return request
    for stream in (0, 1, 2, *given[1:]):
        os.close(stream)
    with contextlib.suppress(BrokenPipeError):  # nobody is interested
        os.write(given[0], _NUMBER.pack(pid))
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(given[0], _NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["magnetar", *request["arguments"]]
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        handling = getattr(sys, name).errors
        stream = open(number, mode, encoding="utf-8", errors=handling, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.modules.pop(request["module"], None)
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _MOST_BYTES)
    _import_all()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    gc.collect()
    gc.freeze()
    if request := _serve(requests):
        _become(request)


if __name__ == "__main__":
    _main()
