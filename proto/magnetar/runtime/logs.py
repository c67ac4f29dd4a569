"""Logging of the daemons (server only): structlog on top, everything that uses the standard library routed through it.

Modules log through `logging.getLogger("magnetar.<room>")` or `structlog.get_logger()`; both come out alike: for people on
a terminal, one JSON object a line for machines. Times are UTC.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO

import structlog

from magnetar.proto.errors import InvalidSetting

Format = Literal["auto", "console", "json"]
_LEVELS = ("debug", "info", "warning", "error")


def configure_logging(
    *, format: Format = "auto", level: str = "info", stream: TextIO | None = None, daemon: str = ""
) -> None:
    """Replaces the handlers of the root logger. "auto": console on a terminal, else JSON. `daemon` is added to each line."""
    if level.lower() not in _LEVELS:
        raise InvalidSetting(f"log level {level!r} is not one of {', '.join(_LEVELS)}", setting="log_level")
    if stream is None:
        stream = sys.stderr
    human = format == "console" or (format == "auto" and stream.isatty())
    bound = {"daemon": daemon} if daemon else {}

    def add_daemon(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event.update(bound)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        add_daemon,
    ]
    final: list[structlog.typing.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if human:
        final.append(structlog.dev.ConsoleRenderer(colors=stream.isatty()))
    else:
        final += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=final))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # A connection that the peer resets is no news; aiohttp would log one line for every scrape.
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
