"""How a message is printed: its value, a line for people, JSON, or a template such as `{key} {value} {properties[shop]}`.

Fields of a template are looked up in a table: it reaches no attribute of anything, whoever wrote it. What is wrong with it
is said before a message is received. A field without a value is empty; a doubled brace is a brace; `\\t`, `\\n` and
`\\\\` are what they are in Python, since shells pass them on as they are written.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magnetar.proto.errors import InvalidArgument

from ..terminal.session import exclusive, parsed

if TYPE_CHECKING:
    from magnetar.client import Message

    Encode = Callable[[Message], bytes]
    Field = Callable[[Message], bytes | str | int | None]

# What `--format line` shows of a value: a file of megabytes must not flood the terminal.
SHOWN_BYTES = 16 * 1024

Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="plain: the value as it is; line: id, publish time, key, properties and value, for people; json: as --json; "
        "or a text with fields of a message in braces: '{key} {value} {properties\\[shop]}'. Without it line on a terminal, "
        "else plain.",
        metavar="FORMAT",
        show_default=False,
    ),
]


def chosen(format: str | None, *, as_json: bool) -> Encode:
    """By --format and --json; what is wrong with them ends the command."""
    exclusive({"--format": format, "--json": as_json})
    return parsed("--format", encoder, "json" if as_json else format)


def as_plain(message: Message) -> bytes:
    """The value as it is."""
    return message.value or b""


def as_json(message: Message) -> bytes:
    """As `as_record`."""
    return json.dumps(as_record(message), ensure_ascii=False).encode()


def as_record(message: Message) -> dict[str, Any]:
    """A message as `--json` prints it; a value that is not UTF-8 is in "value_base64"."""
    key, value = message.key, message.value
    record: dict[str, Any] = {
        "id": str(message.id),
        "key": key.decode(errors="replace") if isinstance(key, bytes) else key,
    }
    try:
        record["value"] = None if value is None else value.decode()
    except UnicodeDecodeError:
        record["value_base64"] = base64.b64encode(value or b"").decode()
    record["properties"] = dict(message.properties)
    record["publish_time"] = message.publish_time
    record["event_time"] = message.event_time
    record["redelivery_count"] = message.redelivery_count
    record["topic"] = message.topic
    return record


def as_line(message: Message, *, dim: bool = False) -> bytes:
    """For people: id, publish time (local), key and properties if there are any, value. `dim`: all but the value is grey.

    Control characters and bytes that are not text are shown as escapes: `\\x1b`, `\\n`, `\\xff`.
    """
    fields = [str(message.id), _local_time(message.publish_time)]
    if message.key is not None:
        fields.append(f"key={printable(message.key)}")
    if message.properties:
        pairs = ", ".join(f"{printable(k)}={printable(v)}" for k, v in message.properties.items())
        fields.append(f"{{{pairs}}}")
    head, value = "  ".join(fields), message.value
    if value is None:
        shown, note = "", "(no value)"
    elif len(value) > SHOWN_BYTES:
        shown, note = (
            printable(value[:SHOWN_BYTES]),
            f"... ({len(value):,} bytes; --format plain writes all)",
        )
    else:
        shown, note = printable(value), "" if value else "(empty)"
    if dim:
        head, note = f"\x1b[2m{head}\x1b[0m", note and f"\x1b[2m{note}\x1b[0m"
    return f"{head}  {shown}{note}".encode()


def _local_time(ms: int) -> str:
    try:
        when = datetime.fromtimestamp(ms / 1000, UTC).astimezone()
    except (ValueError, OverflowError, OSError):  # a producer's clock may be wrong by any amount
        return f"{ms} ms"
    return when.replace(tzinfo=None).isoformat(" ", "milliseconds")


def printable(data: bytes | str) -> str:
    """Text that no terminal takes for a command: control characters and bytes that are not text become escapes."""
    text = data.decode(errors="backslashreplace") if isinstance(data, bytes) else data
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def encoder(format: str | None) -> Encode:
    """What makes a line of a message. None: for people on a terminal, else the plain value. Raises InvalidArgument."""
    terminal = sys.stdout.isatty()
    if format not in (None, "plain", "line", "json"):
        if "{" not in format:
            raise InvalidArgument(
                f"{format!r} is neither plain, line or json nor a template with fields in braces, as '{{key}} {{value}}'"
            )
        template = Template(format)
        return lambda message: template.encode(message, printable if terminal else None)
    if format is None:
        format = "line" if terminal else "plain"
    if format == "line":
        dim = terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        return lambda message: as_line(message, dim=dim)
    return as_json if format == "json" else as_plain


FIELDS: dict[str, Field] = {
    "id": lambda message: str(message.id),
    "topic": lambda message: message.topic,
    "key": lambda message: message.key,
    "value": lambda message: message.value,
    "publish_time": lambda message: message.publish_time,
    "event_time": lambda message: message.event_time,
    "redelivery_count": lambda message: message.redelivery_count,
    "sequence_id": lambda message: message.sequence_id,
    "producer_name": lambda message: message.producer_name,
}
_PROPERTY = re.compile(r"properties\[(.+)\]", re.DOTALL)
_ESCAPE = re.compile(r"\\([tn\\])")
_ESCAPES = {"t": "\t", "n": "\n", "\\": "\\"}


class Template:
    """A template that was checked. Raises InvalidArgument, which names the fields that there are."""

    def __init__(self, text: str) -> None:
        self._parts: list[bytes | Field] = []
        try:
            parsed = list(Formatter().parse(text))
        except ValueError as error:
            raise InvalidArgument(
                f"{text!r} is no template: {error}; write {{{{ for a brace itself"
            ) from None
        for literal, name, specification, conversion in parsed:
            self._parts.append(_ESCAPE.sub(lambda found: _ESCAPES[found[1]], literal).encode())
            if specification or conversion:
                raise InvalidArgument(
                    f"{text!r}: a field is printed as it is; leave out what follows its name {name!r}"
                )
            if name is not None:
                self._parts.append(_field(text, name))

    def encode(self, message: Message, printable: Callable[[bytes | str], str] | None) -> bytes:
        """A message in this form. `printable`: what makes a terminal take a field for text and nothing else."""
        out: list[bytes] = []
        for part in self._parts:
            if isinstance(part, bytes):
                out.append(part)
                continue
            value = part(message)
            if isinstance(value, int):
                value = str(value)
            if value and printable is not None:
                value = printable(value)
            out.append(value.encode() if isinstance(value, str) else value or b"")
        return b"".join(out)


def _field(text: str, name: str) -> Field:
    found = _PROPERTY.fullmatch(name)
    if found is not None:
        key = found[1]
        return lambda message: message.properties.get(key)
    if name not in FIELDS:
        raise InvalidArgument(
            f"{text!r}: a message has no field {name!r} (want {', '.join(FIELDS)} or properties[NAME])"
        )
    return FIELDS[name]
