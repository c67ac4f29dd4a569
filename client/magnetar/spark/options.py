"""Options of the data source: read once, checked at once. Every error names the option and the cure.

What each of them means is in docs/spark-options.md, which a test holds against this module. Sizes are bytes; `parse` reads
units (64m). What Kafka's and Pulsar's connectors call them is understood as well (`aliases`).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast, get_args

from magnetar.client.core.routing import RoutingHash
from magnetar.client.options import parse_start, time_in_ms
from magnetar.client.service_url import parse_url
from magnetar.proto.compression import COMPRESSION_NAMES
from magnetar.proto.errors import InvalidArgument, InvalidTopicName
from magnetar.proto.ids import MessageId, TopicName

from .aliases import translated

READ_OPTIONS: Final = (
    "service_url", "topic", "topics", "topics_pattern", "path", "start", "end", "partition_bytes", "lease_s", "timeout_s",
    "fail_on_data_loss", "max_rows_per_batch", "max_bytes_per_batch", "min_rows_per_batch", "max_trigger_delay_s",
    "min_partitions", "subscription",
)  # fmt: skip
STREAM_OPTIONS: Final = (
    "max_rows_per_batch", "max_bytes_per_batch", "min_rows_per_batch", "max_trigger_delay_s", "subscription",
)  # fmt: skip
PLACES: Final = (("start", "earliest"), ("end", "latest"))  # with their defaults


class AtOffset(NamedTuple):
    """The message with so many before it in the topic."""

    offset: int

    def __str__(self) -> str:
        return f"offset:{self.offset}"


# "earliest", "latest", an id, an offset, or milliseconds since the epoch.
Place = str | MessageId | AtOffset | int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """For reading. `start` and `end` map full topic names to places; "" stands for all others."""

    service_url: str
    topics: tuple[str, ...] = ()  # full names; empty with a pattern
    pattern: str = ""
    start: Mapping[str, Place]
    end: Mapping[str, Place]
    partition_bytes: int = 64 << 20
    lease_s: float = 600.0
    timeout_s: float = 30.0
    fail_on_data_loss: bool = True
    max_rows_per_batch: int = 0  # 0: no bound
    max_bytes_per_batch: int = 0
    min_rows_per_batch: int = 0
    max_trigger_delay_s: float = 900.0
    min_partitions: int = 0
    subscription: str = ""
    given: frozenset[str] = field(default=frozenset(), compare=False)  # what was not left out

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """From what stood in `.option(...)`. Raises InvalidArgument."""
        given = translated(options)
        _check_names(given, READ_OPTIONS)
        topics, pattern = _topics(given)
        places = {name: _places(name, given.get(name, default)) for name, default in PLACES}
        for name, of_topics in places.items():
            for other in of_topics.keys() - {"", *topics} if topics else ():
                if str(TopicName.parse(other).whole) in topics:
                    continue
                raise InvalidArgument(
                    f"option {name} names topic {other}, which is not read; there is {', '.join(topics)}"
                )
        return cls(
            service_url=_service(given.get("service_url", "")),
            topics=topics,
            pattern=pattern,
            **places,
            partition_bytes=_size("partition_bytes", given.get("partition_bytes", "64m"), 1),
            lease_s=_seconds("lease_s", given.get("lease_s", "600")),
            timeout_s=_seconds("timeout_s", given.get("timeout_s", "30")),
            fail_on_data_loss=_flag("fail_on_data_loss", given.get("fail_on_data_loss", "true")),
            max_rows_per_batch=_size("max_rows_per_batch", given.get("max_rows_per_batch", "0"), 0),
            max_bytes_per_batch=_size("max_bytes_per_batch", given.get("max_bytes_per_batch", "0"), 0),
            min_rows_per_batch=_size("min_rows_per_batch", given.get("min_rows_per_batch", "0"), 0),
            max_trigger_delay_s=_seconds("max_trigger_delay_s", given.get("max_trigger_delay_s", "900")),
            min_partitions=_size("min_partitions", given.get("min_partitions", "0"), 0),
            subscription=given.get("subscription", ""),
            given=frozenset(given),
        )

    def check_stream(self) -> None:
        """Raises InvalidArgument for what means nothing to a stream."""
        if "end" in self.given:
            raise InvalidArgument(
                "option end is for spark.read; leave it out: a stream goes on, or ends with trigger(availableNow=True)"
            )
        if self.max_rows_per_batch and self.max_bytes_per_batch:
            raise InvalidArgument(
                "options max_rows_per_batch and max_bytes_per_batch exclude each other; set one of them"
            )

    def check_batch(self) -> None:
        """Raises InvalidArgument for what only streams have."""
        for name in STREAM_OPTIONS:
            if name in self.given:
                raise InvalidArgument(f"option {name} is for spark.readStream; leave it out")

    def start_of(self, topic: str) -> Place:
        """Where reading the topic, or a partition of it, begins. Raises InvalidArgument."""
        return self._place("start", topic)

    def end_of(self, topic: str) -> Place:
        """Where it ends. Raises InvalidArgument."""
        return self._place("end", topic)

    def _place(self, option: str, topic: str) -> Place:
        places: Mapping[str, Place] = getattr(self, option)
        whole = str(TopicName.parse(topic).whole) if topic else ""
        found = next((places[name] for name in (topic, whole, "") if name in places), dict(PLACES)[option])
        if isinstance(found, MessageId | AtOffset) and topic not in (whole, *places, *self.topics):
            raise InvalidArgument(
                f"option {option} is {found}, a place in one log, and {whole} has partitions: give each its place, as in "
                f'{{"{topic}": "{found}"}}, or earliest, latest or a time'
            )
        return found


WRITE_OPTIONS: Final = (
    "service_url", "topic", "path", "timeout_s", "compression", "max_message_bytes", "query", "batch", "repeated_batch",
    "staged_ttl_s", "key_batches", "routing_hash",
    "checkpointlocation", "queryname",  # Spark's own, which it hands on
)  # fmt: skip
ROUTED_TTL_S: Final = 24 * 3600.0  # more than the broker grants by default
REPEATED_BATCH: Final = ("compare", "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """For writing."""

    service_url: str
    topic: str  # full name; "": each row says it
    timeout_s: float = 30.0
    compression: str = "none"
    max_message_bytes: int = 5 << 20
    query: str = ""
    batch: int = -1  # not set
    repeated_batch: str = "compare"
    staged_ttl_s: float = 0.0  # 0: the broker's
    key_batches: bool = False
    routing_hash: RoutingHash = "murmur3"

    def kept_s(self, *, partitioned: bool = False) -> float:
        """For how long what was staged is kept after the last task that wrote to its topic; 0: as the broker's settings say.

        Where rows say to which topic or partition they go a task that still computes does not know those of the others, and
        renews nothing there.
        """
        return self.staged_ttl_s or (0.0 if self.topic and not partitioned else ROUTED_TTL_S)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """From what stood in `.option(...)`. Raises InvalidArgument."""
        given = translated(options)
        _check_names(given, WRITE_OPTIONS)
        compression = _one_of("compression", given.get("compression", "none"), COMPRESSION_NAMES)
        routed = not given.get("topic") and not given.get("path")
        return cls(
            service_url=_service(given.get("service_url", "")),
            topic="" if routed else _topics(given)[0][0],
            timeout_s=_seconds("timeout_s", given.get("timeout_s", "30")),
            compression=compression,
            max_message_bytes=_size("max_message_bytes", given.get("max_message_bytes", "5m"), 1),
            query=given.get("query", ""),
            batch=_batch(given),
            repeated_batch=_one_of("repeated_batch", given.get("repeated_batch", "compare"), REPEATED_BATCH),
            key_batches=_flag("key_batches", given.get("key_batches", "false")),
            routing_hash=cast(
                RoutingHash,
                _one_of("routing_hash", given.get("routing_hash", "murmur3"), get_args(RoutingHash)),
            ),
            staged_ttl_s=_size("staged_ttl_s", given.get("staged_ttl_s", "0"), 0),
        )


def _check_names(given: Mapping[str, str], known: tuple[str, ...]) -> None:
    for name in given:
        if name.startswith("kafka."):
            raise InvalidArgument(
                f"option {name!r} is for Kafka's client; the service is named by service_url, magnetar://host:port, and no "
                "other option of that client is needed"
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"
            raise InvalidArgument(f"option {name!r} is not known; {hint}")


def _one_of(option: str, text: str, known: tuple[str, ...]) -> str:
    if text.lower() not in known:
        raise InvalidArgument(f"option {option} is {text!r}; want one of {', '.join(known)}")
    return text.lower()


def _batch(given: Mapping[str, str]) -> int:
    text = given.get("batch", "")
    if not text:
        return -1
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 63:
        raise InvalidArgument(
            f"option batch is {text!r}; want a whole number of at least 0, as foreachBatch gives it"
        )
    if not given.get("query"):
        raise InvalidArgument("option batch is the number of a batch of a query; the option query names that")
    return int(text)


def _service(url: str) -> str:
    try:
        parse_url(url)
    except InvalidArgument:
        raise InvalidArgument(
            f"option service_url is {url!r}; want magnetar://host:port, as `magnetar standalone` prints it"
        ) from None
    return url


def _topics(given: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    named = [name for name in ("topic", "topics", "topics_pattern", "path") if given.get(name)]
    if len(named) != 1:
        raise InvalidArgument(
            "one of the options topic, topics and topics_pattern says what to read, not "
            f"{' and '.join(named) or 'none of them'}"
        )
    value = given[named[0]]
    if named[0] == "topics_pattern":
        try:
            re.compile(value)
        except re.error as error:
            raise InvalidArgument(f"option topics_pattern is not a regular expression: {error}") from None
        return (), value
    names = [name.strip() for name in value.split(",")] if named[0] == "topics" else [value]
    try:
        return tuple(dict.fromkeys(str(TopicName.parse(name)) for name in names)), ""
    except InvalidTopicName as error:
        raise InvalidArgument(f"option {named[0]}: {error}") from None


def _places(option: str, text: str) -> dict[str, Place]:
    if not text.lstrip().startswith("{"):
        return {"": _place(option, text)}
    try:
        by_topic = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"option {option} is not JSON: {error}") from None
    return {
        str(TopicName.parse(topic)) if topic else "": _place(option, place)
        for topic, place in by_topic.items()
    }


def _place(option: str, place: Any) -> Place:
    text = str(place).strip()
    if re.fullmatch(r"offset:\d{1,18}", text):
        return AtOffset(int(text.partition(":")[2]))
    try:
        return time_in_ms(place) if isinstance(place, int) else parse_start(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"option {option}: {error.message}") from None


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def _size(option: str, text: str, least: int) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)b?", text.strip().lower())
    if match is None or int(match[1]) * _UNITS[match[2]] < least:
        raise InvalidArgument(
            f"option {option} is {text!r}; want a whole number of at least {least}, also as 64m"
        )
    return int(match[1]) * _UNITS[match[2]]


def _seconds(option: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise InvalidArgument(f"option {option} is {text!r}; want a positive number of seconds")
    return seconds


def _flag(option: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InvalidArgument(f"option {option} is {text!r}; want true or false")
    return text.lower() == "true"
