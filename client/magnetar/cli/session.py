"""How a command talks to a service and ends: one loop, one client, one line on standard error when it fails.

Exit codes: 0 done, 1 the service or the call failed, 2 the command line is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Coroutine
from datetime import datetime
from typing import Any, NoReturn

from magnetar.client import MessageId
from magnetar.proto.errors import InvalidArgument, MagnetarError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """One clear line on standard error, and out."""
    print(f"magnetar: {message}", file=sys.stderr)
    raise SystemExit(code)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a command on the fast loop where there is one; turns errors into one line and an exit code."""
    # The client's warnings are of what ends the command anyway, with a line of its own.
    logging.getLogger("magnetar.client").setLevel(logging.ERROR)
    try:
        if sys.platform == "win32":
            asyncio.run(main)
        else:
            import uvloop

            uvloop.run(main)
        sys.stdout.flush()
    except MagnetarError as error:
        fail(error.message)
    except BrokenPipeError:
        # `magnetar consume ... | head`: who read us has enough. Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_FAILED) from None
    except OSError as error:
        # A full disk below standard output, say; the client turns errors of its connections into MagnetarError.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        fail(f"cannot write the output: {error.strerror or error}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(EXIT_INTERRUPTED) from None


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(value, default=str, ensure_ascii=False), flush=True)


def parse_start(text: str) -> str | MessageId | datetime:
    """What `--start` means. Raises InvalidArgument, which shows the forms."""
    if text in ("earliest", "latest"):
        return text
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        pass
    try:
        return MessageId.parse(text)
    except InvalidArgument:
        raise InvalidArgument(
            f"not a start position: {text!r} (want earliest, latest, ledger:entry:index or a time like "
            "2026-01-31T12:00:00)"
        ) from None
