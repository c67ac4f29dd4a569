"""`magnetar ...` as a process of its own that need not import anything: most commands import for longer than they work.

    done = run_magnetar("topics", "list", "--url", url)      # as subprocess.run(..., capture_output=True)

One process a test worker imports all that the commands may need, and waits on a socket:

    test ──arguments, environment, three pipes──> server ──fork──> keeper ──fork──> the command: main()
      <──────────── process id, exit code ───────────────────────────┘

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
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from magnetar.cli.main import main

__all__ = ["run_magnetar"]

_TESTS = Path(__file__).parents[1]
_MOST_BYTES = 1 << 17  # of a request
_NUMBER = struct.Struct("<i")
_COMMAND = [sys.executable, "-m", "magnetar.cli.main"]
_starting = threading.Lock()
_server: socket.socket | None = None


def run_magnetar(
    *arguments: str, stdin: bytes = b"", environment: Mapping[str, str] | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Runs `magnetar ARGUMENTS` to its end. subprocess.TimeoutExpired when that does not come."""
    environment = dict(os.environ if environment is None else environment)
    if any(name.startswith("COVERAGE_PROCESS") for name in environment):  # it follows no forks
        plain = subprocess.run(
            [*_COMMAND, *arguments], input=stdin, env=environment, capture_output=True, timeout=timeout
        )
        return subprocess.CompletedProcess(
            plain.args, plain.returncode, plain.stdout.decode(), plain.stderr.decode()
        )
    ours, theirs = socket.socketpair()
    streams = [os.pipe() for _ in range(3)]
    request = json.dumps({"arguments": arguments, "environment": environment, "folder": os.getcwd()})
    with ours:
        with theirs:
            given = [theirs.fileno(), streams[0][0], streams[1][1], streams[2][1]]
            with _starting:
                socket.send_fds(_started(), [request.encode()], given)
        for number in given[1:]:
            os.close(number)
        out, errors = bytearray(), bytearray()
        threads = [
            threading.Thread(target=_write, args=(streams[0][1], stdin)),
            threading.Thread(target=_read, args=(streams[1][0], out)),
            threading.Thread(target=_read, args=(streams[2][0], errors)),
        ]
        for thread in threads:
            thread.start()
        ours.settimeout(timeout)
        (pid,) = _NUMBER.unpack(ours.recv(_NUMBER.size))
        try:
            (code,) = _NUMBER.unpack(ours.recv(_NUMBER.size))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(
                [*_COMMAND, *arguments], timeout, bytes(out), bytes(errors)
            ) from None
        finally:
            for thread in threads:
                thread.join()
    return subprocess.CompletedProcess([*_COMMAND, *arguments], code, out.decode(), errors.decode())


def _write(pipe: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as file:
        file.write(data)


def _read(pipe: int, into: bytearray) -> None:
    with open(pipe, "rb") as file:
        into += file.read()


def _started() -> socket.socket:
    """The socket of this process's server, which ends when the socket is closed."""
    global _server
    if _server is None:
        _server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
        path = os.pathsep.join(filter(None, (str(_TESTS), os.environ.get("PYTHONPATH"))))
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "support.forked_commands", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
            ).returncode = 0  # nobody waits for it
    return _server


# --- the server ----------------------------------------------------------------------------------------------------------


def _import_all() -> None:
    """What commands and daemons import, but for Spark and archives."""
    for root in ("proto", "runtime", "metadata", "ledger", "bookie", "broker", "client", "cli"):
        package = importlib.import_module(f"magnetar.{root}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not any(word in module.name for word in ("spark", "archive", "export", "__main__")):
                importlib.import_module(module.name)


def _serve(requests: socket.socket) -> bool:
    """False when nobody can ask any more; True in the process of each command."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers
    while True:
        text, given, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
        if not text:
            return False
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            _keep(json.loads(text), given)
            return True
        for number in given:
            os.close(number)


def _keep(request: dict[str, object], given: list[int]) -> None:
    """Returns in the process of the command."""
    pid = os.fork()
    if pid == 0:
        os.close(given[0])
        for number, stream in enumerate(given[1:]):
            os.dup2(stream, number)
            os.close(stream)
        _become(request)
        return
    for stream in (0, 1, 2, *given[1:]):
        os.close(stream)
    os.write(given[0], _NUMBER.pack(pid))
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(given[0], _NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(request: dict[str, object]) -> None:
    arguments, environment, folder = request["arguments"], request["environment"], request["folder"]
    assert isinstance(arguments, list)
    assert isinstance(environment, dict)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(str(folder))
    sys.argv = ["magnetar", *arguments]
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        old = getattr(sys, name)
        stream = open(number, mode, encoding="utf-8", errors=old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _MOST_BYTES)
    _import_all()
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    if _serve(requests):
        main()


if __name__ == "__main__":
    _main()
