"""How a command talks to a service and ends: one loop, one client, one line on standard error when it fails.

Exit codes: 0 done; 1 the service or the call failed; 2 what was asked for is wrong, which the same command again does not
help: the command line, or a name or a value in it; 78 a setting is wrong; 130 Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from magnetar.proto.errors import InvalidArgument, InvalidSetting, InvalidTopicName, MagnetarError
from magnetar.runtime.quantities import parse_duration

if TYPE_CHECKING:
    from magnetar.client import Client
    from magnetar.client.options import Start

S = TypeVar("S")
T = TypeVar("T")

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CONFIG = 78
EXIT_INTERRUPTED = 130

_SAID_ONCE_S = 10.0
# What `confirm` says to a script.
DELETES = "this deletes data: say --yes"


def say(message: str) -> None:
    """One line on standard error, for people."""
    print(f"magnetar: {message}", file=sys.stderr, flush=True)


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Prints one clear line on standard error and ends the command."""
    say(message)
    raise SystemExit(code)


def exit_code(error: MagnetarError) -> int:
    """The exit code of a command that ends with this error."""
    if isinstance(error, InvalidSetting):
        return EXIT_CONFIG
    return EXIT_USAGE if isinstance(error, InvalidArgument | InvalidTopicName) else EXIT_FAILED


class _Warnings(logging.Handler):
    """What the client warns of, as lines on standard error."""

    def __init__(self) -> None:
        super().__init__()
        self._said: list[str] = []
        self._until = 0.0  # what was said is not said again before

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if self.told(text) and record.created < self._until:
            return  # a hundred sends that fail for one reason are one line
        self._until = record.created + _SAID_ONCE_S
        self._said = [*self._said[-9:], text]
        say(text)

    def told(self, reason: str) -> bool:
        """Whether one of the last lines gave this reason."""
        return any(reason in text for text in self._said)


def connected(url: str) -> AbstractAsyncContextManager[Client]:
    """A client of the service. It is imported only now: 150 ms that help pages do without."""
    from magnetar.client import connect

    return connect(url)


def run(main: Coroutine[Any, Any, None], *, warnings: bool = False) -> None:
    """Runs a command on the fast loop where there is one; turns errors into one line and an exit code.

    Ctrl-C and the first SIGTERM cancel it, so that it can print what was done so far. After SIGTERM the process ends by that
    signal, as whoever sent it expects; a second one ends it at once.

    `warnings`: the command may wait for ever, so what the client warns of is said. Else that ends the command anyway, with
    one line of its own.
    """
    client_log = logging.getLogger("magnetar.client")
    level = client_log.level
    client_log.setLevel(logging.WARNING if warnings else logging.ERROR)
    handler = _Warnings()
    client_log.addHandler(handler)
    terminated = asyncio.Event()
    try:
        if sys.platform == "win32":
            asyncio.run(main)
        else:
            import uvloop

            uvloop.run(_until_terminated(main, terminated))
        sys.stdout.flush()
    except MagnetarError as error:
        if handler.told(error.message):
            raise SystemExit(exit_code(error)) from None
        fail(error.message, exit_code(error))
    except BrokenPipeError:
        # `magnetar consume ... | head`: the reader has ended. Python would print an error when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_FAILED) from None
    except OSError as error:
        # A full disk below standard output, say; the client turns errors of its connections into MagnetarError.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        fail(f"cannot write the output: {error.strerror or error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(EXIT_INTERRUPTED) from None
    finally:
        client_log.removeHandler(handler)
        client_log.setLevel(level)
        if terminated.is_set():
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGTERM)


async def _until_terminated(main: Coroutine[Any, Any, None], terminated: asyncio.Event) -> None:
    """`main`, which the first SIGTERM cancels."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def terminate() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        terminated.set()
        task.cancel()

    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGTERM, terminate)
    await main


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(value, default=str, ensure_ascii=False), flush=True)


def exclusive(given: Mapping[str, Any]) -> None:
    """Ends the command with a line that names options that were given together and cannot be: none is None, False or []."""
    names = [name for name, value in given.items() if value not in (None, False, [])]
    if len(names) > 1:
        fail(f"{' and '.join(names)} exclude each other", EXIT_USAGE)


def confirm(question: str, yes: bool, *, refusal: str = DELETES) -> None:
    """Asks at a terminal; in a script `--yes` is needed."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail(refusal, EXIT_USAGE)
    import typer

    typer.confirm(question, abort=True)


def utf8(text: str) -> str:
    """For an argument that becomes text on the wire. Raises InvalidArgument for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"its bytes are not UTF-8: {os.fsencode(text)!r}") from None
    return text


def parsed(option: str, parse: Callable[[S], T], text: S) -> T:
    """The value of an option; a wrong one ends the command with a line that names the option."""
    try:
        return parse(text)
    except InvalidArgument as error:
        fail(f"{option}: {error.message}", EXIT_USAGE)


def start_of(text: str) -> Start:
    """What `--start` means; `-1h`: an hour ago."""
    if text.startswith("-"):
        return max(round(time.time() * 1000) - milliseconds("--start", text[1:]), 0)
    return where("--start", text)


def where(option: str, text: str) -> Start:
    """A place in a topic, as people write it; a wrong one ends the command with a line that names the option."""
    from magnetar.client.options import parse_start

    return parsed(option, parse_start, text)


def milliseconds(option: str, text: str) -> int:
    """A duration as people write it; a wrong one ends the command with a line that names the option."""
    with contextlib.suppress(ValueError, OverflowError):
        if text.strip() == "0" or text.strip()[-1:].isalpha():
            return round(parse_duration(text, "ms"))
    fail(f"{option} is {text!r}; want a number with a unit, as 90s, 2h or 7d", EXIT_USAGE)


def named_values(option: str, texts: Sequence[str], example: str) -> dict[str, str]:
    """From an option that is repeated as NAME=VALUE; a wrong one ends the command with a line that shows an example."""
    found: dict[str, str] = {}
    for text in texts:
        parsed(option, utf8, text)
        name, equals, value = text.partition("=")
        if not equals or not name:
            fail(f"{option} is {text!r}; want NAME=VALUE, as {example}", EXIT_USAGE)
        found[name] = value
    return found
