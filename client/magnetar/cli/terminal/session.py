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
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from magnetar.proto.errors import InvalidArgument, InvalidSetting, InvalidTopicName, MagnetarError
from magnetar.runtime.quantities import parse_duration

if TYPE_CHECKING:
    from magnetar.client.options import Start

S = TypeVar("S")
T = TypeVar("T")

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CONFIG = 78
EXIT_INTERRUPTED = 130


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Prints one clear line on standard error and ends the command."""
    print(f"magnetar: {message}", file=sys.stderr)
    raise SystemExit(code)


def exit_code(error: MagnetarError) -> int:
    """The exit code of a command that ends with this error."""
    if isinstance(error, InvalidSetting):
        return EXIT_CONFIG
    return EXIT_USAGE if isinstance(error, InvalidArgument | InvalidTopicName) else EXIT_FAILED


class _Warnings(logging.Handler):
    """What the client warns of, as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"magnetar: {record.getMessage()}", file=sys.stderr, flush=True)


def run(main: Coroutine[Any, Any, None], *, warnings: bool = False) -> None:
    """Runs a command on the fast loop where there is one; turns errors into one line and an exit code.

    `warnings`: the command may wait for ever, so what the client warns of is said. Else that ends the command anyway, with
    one line of its own.
    """
    client_log = logging.getLogger("magnetar.client")
    level = client_log.level
    client_log.setLevel(logging.WARNING if warnings else logging.ERROR)
    handler = _Warnings()
    client_log.addHandler(handler)
    try:
        if sys.platform == "win32":
            asyncio.run(main)
        else:
            import uvloop

            uvloop.run(main)
        sys.stdout.flush()
    except MagnetarError as error:
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


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(value, default=str, ensure_ascii=False), flush=True)


def exclusive(given: Mapping[str, bool]) -> None:
    """Ends the command with a line that names options that were given together and cannot be."""
    names = [name for name, wanted in given.items() if wanted]
    if len(names) > 1:
        fail(f"{' and '.join(names)} exclude each other", EXIT_USAGE)


def confirm(question: str, yes: bool, *, refusal: str = "this deletes data: say --yes") -> None:
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
    from magnetar.client.options import parse_start

    if text.startswith("-"):
        return max(round(time.time() * 1000) - milliseconds("--start", text[1:]), 0)
    return parsed("--start", parse_start, text)


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
