"""Output templates: a text with fields of a message in braces, as `--format '{key} {value} {properties[shop]}'`.

Fields are looked up in a table: a template reaches no attribute of anything, whoever wrote it. What is wrong with it is said
before a message is received. A field without a value is empty; a doubled brace is a brace; `\\t`, `\\n` and `\\\\` are what
they are in Python, since shells pass them on as they are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from string import Formatter

from magnetar.client import InvalidArgument, Message

Field = Callable[[Message], bytes | str | int | None]

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
