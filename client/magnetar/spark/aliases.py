"""Options of Kafka's and Pulsar's Spark connectors, as ours: whoever moves over changes the format and the URL. Pure.

Offsets are those of a log: Kafka's JSON names partitions, and a topic without any is one, "0". What they call headers is the
column `properties`, which is always there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import TopicName


def translated(given: Mapping[str, str]) -> dict[str, str]:
    """Options by our names, all in lower case. Raises InvalidArgument for one that is given twice, or cannot be meant."""
    found: dict[str, str] = {}
    came_from: dict[str, str] = {}
    for name, value in given.items():
        own, translate = ALIASES.get(name.lower(), (name.lower(), str))
        if own in found:
            raise InvalidArgument(f"options {came_from[own]} and {name} say the same; leave one of them out")
        came_from[own] = name
        found[own] = translate(str(value))
    found.pop("includeheaders", None)
    return found


def _offsets(text: str) -> str:
    """`earliest`, `latest`, or JSON: {"orders": {"0": 23}} or {"orders": 23}, with -2 for earliest and -1 for latest."""
    return _json(text, lambda number: {-2: "earliest", -1: "latest"}.get(number, f"offset:{number}"))


def _times(text: str) -> str:
    """Milliseconds since the epoch, or JSON with them for each topic."""
    return _json(
        text if text.lstrip().startswith("{") else json.dumps({"": _whole(text)}), lambda number: number
    )


def _json(text: str, place_of: Callable[[int], str | int]) -> str:
    if not text.lstrip().startswith("{"):
        return text
    try:
        places = {name: one for topic, of in json.loads(text).items() for name, one in _logs(topic, of)}
        return json.dumps({name: place_of(_whole(one)) for name, one in places.items()})
    except InvalidArgument:
        raise
    except ValueError as error:
        raise InvalidArgument(f"{text!r} is not JSON: {error}") from None


def _logs(topic: str, given: Any) -> Iterator[tuple[str, Any]]:
    """A topic with its only partition, '0', is one that is not partitioned, as far as can be seen here."""
    if not isinstance(given, dict):
        yield topic, given
    elif given.keys() == {"0"}:
        yield topic, given["0"]
    else:
        for number, one in given.items():
            if not number.isdecimal():
                raise InvalidArgument(f"{number!r} is no number of a partition of {topic}")
            yield str(TopicName.parse(topic).partition_of(int(number))), one


def _whole(given: Any) -> int:
    try:
        number = int(given)
    except (TypeError, ValueError):
        number = -3
    if number < -2:
        raise InvalidArgument(f"{given!r} is no offset and no time; want a whole number")
    return number


# What the other connectors call it, in lower case, and what we do.
ALIASES: Final[dict[str, tuple[str, Callable[[str], str]]]] = {
    "service.url": ("service_url", str),
    "subscribe": ("topics", str),
    "subscribepattern": ("topics_pattern", str),
    "topicspattern": ("topics_pattern", str),
    "startingoffsets": ("start", _offsets),
    "endingoffsets": ("end", _offsets),
    "startingtimestamp": ("start", _times),
    "endingtimestamp": ("end", _times),
    "startingtime": ("start", _times),
    "endingtime": ("end", _times),
    "startingoffsetsbytimestamp": ("start", _times),
    "endingoffsetsbytimestamp": ("end", _times),
    "maxoffsetspertrigger": ("max_rows_per_batch", str),
    "minoffsetspertrigger": ("min_rows_per_batch", str),
    "maxbytespertrigger": ("max_bytes_per_batch", str),
    "maxtriggerdelay": ("max_trigger_delay_s", str),
    "minpartitions": ("min_partitions", str),
    "failondataloss": ("fail_on_data_loss", str),
    "predefinedsubscription": ("subscription", str),
}
