"""What a user can set, as checked, frozen data. Each option is declared here, once: calls get them by `taken_by`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import random
import re
import ssl
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from datetime import datetime
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

from magnetar.proto.compression import Compression, CompressionName
from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import MessageId, TopicName, check_subscription_name
from magnetar.proto.message_rules import check_message_count, checked_time_ms
from magnetar.runtime.clock import Clock

from .chunked_id import last_place
from .core.routing import Routing, RoutingHash, check_routing
from .durations import FOR_EVER, SECONDS, OptionalSeconds, Seconds, in_seconds, set_in_seconds
from .service_url import AutoFailover, parse_url

P = ParamSpec("P")
O = TypeVar("O")  # noqa: E741
S = TypeVar("S")
R = TypeVar("R")

SubscriptionType = Literal["exclusive", "failover", "shared", "key_shared"]
AccessMode = Literal["shared", "exclusive", "wait_for_exclusive", "exclusive_with_fencing"]
SUBSCRIPTION_TYPES: tuple[SubscriptionType, ...] = get_args(SubscriptionType)
INDIVIDUAL_TYPES = ("shared", "key_shared")  # each message is acknowledged by itself

Start = Literal["earliest", "latest"] | MessageId | datetime | int
"""Where reading starts: "earliest", "latest", a message id (inclusive), or a time: ms since the epoch, or a datetime, which
is local time if it has no tzinfo."""

_MILLISECONDS = re.compile("[0-9]{13}")
TIME_FORMS = "2026-01-31T12:00:00 in local time, 2026-01-31T12:00:00Z or +02:00, or 13 digits: milliseconds since the epoch"
DEFAULT_MAX_MESSAGE_BYTES = 5 * 1024 * 1024

WireStart = tuple[str, Any]
"""The same as Subscribe and Seek carry it (WIRE.md)."""


def taken_by(options: Callable[P, O]) -> Callable[[Callable[[S, O], R]], Callable[Concatenate[S, P], R]]:
    """Gives a method that takes options as one object their fields as its arguments: for callers, checkers and `help`."""

    def decorate(method: Callable[[S, O], R]) -> Callable[Concatenate[S, P], R]:
        made = _named_as(method, options)

        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return method(self, made(*args, **kwargs))

        return _with_signature(call, method, options)

    return decorate


def function_taken_by(options: Callable[P, O]) -> Callable[[Callable[[O], R]], Callable[P, R]]:
    """The same for a function."""

    def decorate(function: Callable[[O], R]) -> Callable[P, R]:
        made = _named_as(function, options)

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(made(*args, **kwargs))

        return _with_signature(call, function, options)

    return decorate


def _named_as(function: Callable[..., Any], options: Callable[P, O]) -> Callable[P, O]:
    """What is wrong about arguments is said of the call that was made."""

    def make(*args: P.args, **kwargs: P.kwargs) -> O:
        try:
            return options(*args, **kwargs)
        except TypeError as error:
            raise TypeError(re.sub(r"^\w+\.__init__", function.__name__, str(error))) from None

    return make


F = TypeVar("F", bound=Callable[..., Any])


def _with_signature(call: F, function: Callable[..., Any], options: Callable[..., Any]) -> F:
    functools.update_wrapper(call, function)
    signature = inspect.signature(function)
    *before, _ = signature.parameters.values()
    parameters = [*before, *inspect.signature(options).parameters.values()]
    vars(call)["__signature__"] = signature.replace(parameters=parameters)
    return call


def _positive(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, int | float) or not value > 0:
            raise InvalidArgument(f"{name} must be greater than 0, not {value!r}")


def _positive_int(options: object, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if type(value) is not int or not 0 < value < 1 << 63:
            raise InvalidArgument(f"{name} must be greater than 0 and a whole number, not {value!r}")


def _delays(options: object, *names: str) -> None:
    for name in names:
        checked_delay(name, getattr(options, name))


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The arguments of `connect`; durations in seconds, or timedeltas."""

    url: str | AutoFailover
    _: KW_ONLY
    operation_timeout: Seconds = 30.0 * SECONDS  # for everything that asks the service something
    connect_timeout: Seconds = 10.0 * SECONDS
    ping_interval: Seconds = 30.0 * SECONDS
    backoff_first: Seconds = 0.1 * SECONDS  # pause before the second attempt to reconnect; doubles each time
    backoff_max: Seconds = 5.0 * SECONDS
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    max_queued_bytes: int = 128 * 1024 * 1024  # in all receiver queues together, or asked for
    max_pending_bytes: int | None = (
        64 * 1024 * 1024
    )  # of all producers together; None: each has its own bound alone
    tls: ssl.SSLContext | None = None
    name: str = "python"  # what the service's log calls this client
    on_connection_state: Callable[[str], object] | None = None
    clock: Clock | None = None  # for simulations, as `rng`
    rng: random.Random | None = None

    def __post_init__(self) -> None:
        set_in_seconds(self)
        if not isinstance(self.url, AutoFailover):
            parse_url(self.url)
        _positive(
            self, "operation_timeout", "connect_timeout", "ping_interval", "backoff_first", "backoff_max"
        )
        _positive_int(self, "max_message_bytes", "max_queued_bytes")
        if self.max_pending_bytes is not None:
            _positive_int(self, "max_pending_bytes")
        name_of_client: Any = self.name
        if not isinstance(name_of_client, str) or not name_of_client.isprintable():
            raise InvalidArgument(f"the name of a client is printable text, not {name_of_client!r}")


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """The arguments of `create_producer`; durations in seconds, or timedeltas. `topic` becomes its full name."""

    topic: str
    _: KW_ONLY
    name: str | None = None  # None: the service gives one
    access_mode: AccessMode = "shared"  # who else may produce to the topic meanwhile
    batching: bool = True  # False: every message is a batch of one in a frame of its own
    batching_max_messages: int = 1000
    batching_max_bytes: int = 128 * 1024
    batching_max_delay: Seconds = (
        0.001 * SECONDS
    )  # only while something is in flight; else the end of the loop turn
    batching_by_key: bool = False  # a batch for each key, which key_shared consumers receive whole
    routing: Routing = "round_robin"  # of a partitioned topic
    routing_hash: RoutingHash = "murmur3"  # of keys
    chunking: bool = False  # True: what is larger than max_message_bytes is sent in chunks
    compression: CompressionName = "none"
    send_timeout: Seconds = 30.0 * SECONDS
    max_pending_bytes: int = (
        64 * 1024 * 1024
    )  # values of messages that are not confirmed yet; shared by partitions
    block_when_full: bool = True  # False: `send` raises ProducerQueueFull instead of waiting

    def __post_init__(self) -> None:
        set_in_seconds(self)
        object.__setattr__(self, "topic", str(TopicName.parse(self.topic)))
        _positive(self, "batching_max_messages", "batching_max_bytes", "send_timeout", "max_pending_bytes")
        check_message_count(self.batching_max_messages)
        _delays(self, "batching_max_delay")
        if self.access_mode not in get_args(AccessMode):
            raise InvalidArgument(
                f"unknown access_mode {self.access_mode!r}; want one of {', '.join(get_args(AccessMode))}"
            )
        check_routing(self.routing, self.routing_hash)
        Compression.parse(self.compression)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedeliveryBackoff:
    """Pauses that grow: a message that was delivered n times before waits min_delay * multiplier ** n seconds.

    >>> [RedeliveryBackoff(min_delay=1.0, max_delay=5.0).delay(count) for count in range(4)]
    [1.0, 2.0, 4.0, 5.0]
    """

    min_delay: Seconds = 1.0 * SECONDS
    max_delay: Seconds = 60.0 * SECONDS
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        set_in_seconds(self)
        if not 0 <= self.min_delay <= self.max_delay < math.inf:
            raise InvalidArgument(
                f"a backoff needs 0 <= min_delay <= max_delay, not {self.min_delay!r} and {self.max_delay!r}"
            )
        if not 1 <= self.multiplier < math.inf:
            raise InvalidArgument(f"the multiplier of a backoff must be at least 1, not {self.multiplier!r}")

    def delay(self, redelivery_count: int) -> float:
        """Seconds, of a message with this redelivery count."""
        if self.min_delay == 0 or self.multiplier == 1:
            return self.min_delay
        # Beyond this power it is max_delay; the power itself could be larger than any float.
        longest = math.log(self.max_delay / self.min_delay, self.multiplier)
        if redelivery_count >= longest:
            return self.max_delay
        return self.min_delay * self.multiplier**redelivery_count


MIN_ACK_TIMEOUT_S = 1.0
# How often a message may be delivered again before it goes to the dead-letter topic, unless the policy says so. As Pulsar.
DEFAULT_MAX_REDELIVER_COUNT = 16


# Of the names of dead-letter and retry topics, unless the policy names them.
LETTER_ENDINGS = ("-DLQ", "-RETRY")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterPolicy:
    """Where messages go that could not be processed. Topics None: `{topic}-{subscription}-DLQ` and `-RETRY`, for each topic.

    A message is handed out 1 + max_redeliver_count times at most; then it is written to `topic`, and acknowledged once it is
    durable there. initial_subscription is made on the dead-letter topic before its first message is.
    """

    max_redeliver_count: int = DEFAULT_MAX_REDELIVER_COUNT
    topic: str | None = None
    retry_topic: str | None = None  # of consumers with retry=True
    initial_subscription: str | None = None

    def __post_init__(self) -> None:
        if type(self.max_redeliver_count) is not int or self.max_redeliver_count < 0:
            raise InvalidArgument(
                f"max_redeliver_count must be a whole number, 0 or more, not {self.max_redeliver_count!r}"
            )
        for topic in filter(None, (self.topic, self.retry_topic)):
            TopicName.parse(topic)
        if self.initial_subscription is not None:
            check_subscription_name(self.initial_subscription)

    def check_names(self, topics: list[str], subscription: str) -> None:
        """Raises InvalidTopicName unless the topics' dead-letter and retry topics have possible names."""
        for topic in topics:
            self.dead_letter_topic(topic, subscription)
            self.retry_letter_topic(topic, subscription)

    def dead_letter_topic(self, topic: str, subscription: str) -> str:
        """Full name, for messages of a topic. Raises InvalidTopicName if that would be too long."""
        return str(TopicName.parse(self.topic or f"{topic}-{subscription}-DLQ"))

    def retry_letter_topic(self, topic: str, subscription: str) -> str:
        """Full name, for messages of a topic. Raises InvalidTopicName if that would be too long."""
        return str(TopicName.parse(self.retry_topic or f"{topic}-{subscription}-RETRY"))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """What all that receive have in common.

    receiver_queue_messages is what may wait in the client undelivered. None: 1,000, and while the consumer empties its
    queue faster than the service may fill it, up to 64,000. The last three are of messages in chunks.
    """

    name: str = ""
    receiver_queue_messages: int | None = None
    receiver_queue_bytes: int = 16 * 1024 * 1024
    max_pending_chunked_messages: int = 10  # of which chunks are missing
    expire_incomplete_chunked_messages: Seconds = 60.0 * SECONDS  # without a chunk; then the broker is asked
    max_chunked_message_bytes: int = 1024 * 1024 * 1024  # of one that is not streamed

    def __post_init__(self) -> None:
        set_in_seconds(self)
        if self.receiver_queue_messages is not None:
            _positive_int(self, "receiver_queue_messages")
        _positive_int(
            self, "receiver_queue_bytes", "max_pending_chunked_messages", "max_chunked_message_bytes"
        )
        _positive(self, "expire_incomplete_chunked_messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionOptions(QueueOptions):
    """Where a consumer or reader begins, and what it gets."""

    start: Start = "latest"
    fail_on_trimmed: bool = False  # MessageLost where messages were trimmed before they were read
    read_compacted: bool = False  # consumers: exclusive, failover
    stream_chunks: bool = False  # hands out a message with its first chunk; `stream` reads it

    def __post_init__(self) -> None:
        QueueOptions.__post_init__(self)
        start_on_wire(self.start)


@dataclass(frozen=True, slots=True)
class TableViewOptions(QueueOptions):
    """The arguments of `create_table_view`."""

    topic: str


@dataclass(frozen=True, slots=True)
class ReaderOptions(PositionOptions):
    """The arguments of `create_reader`."""

    topic: str
    _: KW_ONLY
    inclusive: bool = True  # False: behind the message whose id `start` is


@dataclass(frozen=True, slots=True)
class ConsumerOptions(PositionOptions):
    """The arguments of `subscribe`; durations in seconds, or timedeltas."""

    topic: str | Sequence[str] | re.Pattern[str]
    subscription: str
    _: KW_ONLY
    type: SubscriptionType = "exclusive"
    durable: bool = True  # False: the subscription ends with its last consumer
    ack_group_messages: int = 1000
    ack_group_delay: Seconds = 0.1 * SECONDS
    nack_delay: Seconds = 60.0 * SECONDS
    nack_backoff: RedeliveryBackoff | None = None  # in place of nack_delay
    ack_timeout: OptionalSeconds = FOR_EVER  # from handing out on; None: for ever
    dead_letter: DeadLetterPolicy | None = None  # None: messages are delivered again for ever
    retry: bool = False  # consumes the retry topic as well, for `reconsume_later`
    discovery_interval: Seconds = 60.0 * SECONDS  # of a pattern: how often its topics are looked for
    priority_level: int = 0  # failover, shared: 0 is the highest
    hash_ranges: tuple[tuple[int, int], ...] = ()  # key_shared, exclusive: of 65,536 slots; (): all

    def __post_init__(self) -> None:
        PositionOptions.__post_init__(self)
        check_subscription_name(self.subscription)
        if self.type not in SUBSCRIPTION_TYPES:
            raise InvalidArgument(
                f"unknown subscription type {self.type!r} (want {' or '.join(map(repr, SUBSCRIPTION_TYPES))})"
            )
        _positive_int(self, "ack_group_messages")
        _delays(self, "ack_group_delay", "nack_delay")
        _positive(self, "discovery_interval")
        for name, kind in (("nack_backoff", RedeliveryBackoff), ("dead_letter", DeadLetterPolicy)):
            if not isinstance(getattr(self, name), kind | None):
                raise InvalidArgument(f"{name} must be a {kind.__name__}, not {getattr(self, name)!r}")
        if (self.retry or self.dead_letter is not None) and self.type not in INDIVIDUAL_TYPES:
            raise InvalidArgument(
                "retry and dead-letter topics are for subscriptions on which each message is acknowledged by itself: "
                f"subscribe with type='shared' or 'key_shared', not {self.type!r}"
            )
        if self.read_compacted and self.type in INDIVIDUAL_TYPES:
            raise InvalidArgument(
                f"read_compacted is for exclusive and failover subscriptions and for readers, not for type={self.type!r}"
            )
        timeout: Any = self.ack_timeout
        if timeout is not None and not (
            isinstance(timeout, int | float) and MIN_ACK_TIMEOUT_S <= timeout < math.inf
        ):
            raise InvalidArgument(
                f"ack_timeout must be at least {MIN_ACK_TIMEOUT_S:g} s (None: no timeout), not {self.ack_timeout!r}"
            )

    @property
    def letter_policy(self) -> DeadLetterPolicy | None:
        """`dead_letter`, or what retry=True alone means."""
        return self.dead_letter or (DeadLetterPolicy() if self.retry else None)


def checked_delay(name: str, delay: Any) -> float:
    """A duration in seconds. Raises InvalidArgument unless it is a time that passes."""
    found: Any = in_seconds(delay)
    if not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise InvalidArgument(f"{name} must be a number of seconds, not negative, not {found!r}")
    return float(found)


def reading(
    options: ReaderOptions | TableViewOptions, subscription: str, start: Start, **more: Any
) -> ConsumerOptions:
    """Those of the consumer that a reader is: of a subscription that nobody else knows, and that ends with it."""
    kind = PositionOptions if isinstance(options, ReaderOptions) else QueueOptions
    common: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(kind)}
    topic = str(TopicName.parse(options.topic))
    return ConsumerOptions(topic, subscription, durable=False, **{**common, "start": start, **more})


def behind(message: MessageId) -> MessageId:
    """The place behind a message: as a start, the message that follows."""
    last = last_place(message)
    return last._replace(index=last.index + 1)


def start_on_wire(start: Start) -> WireStart:
    """`start` as Subscribe and Seek carry it. Raises InvalidArgument."""
    if isinstance(start, str) and start in ("earliest", "latest"):
        return (start, None)
    if isinstance(start, MessageId):
        return ("id", start.place().to_bytes())
    if isinstance(start, datetime) or (isinstance(start, int) and not isinstance(start, bool)):
        return ("time", time_in_ms(start))
    raise InvalidArgument(
        f"not a start position: {start!r} (want 'earliest', 'latest', a MessageId, which MessageId.parse "
        "reads from text, a datetime or whole milliseconds)"
    )


def time_in_ms(time: Any) -> int:
    """A time as milliseconds since the epoch; a datetime without tzinfo is local time. Raises InvalidArgument."""
    try:
        ms = round(time.timestamp() * 1000) if isinstance(time, datetime) else time
    except (ValueError, OverflowError):  # local time of the year 1 or 9999, which UTC does not have
        ms = time
    return checked_time_ms(ms)


def parse_time(text: str) -> int:
    """A time as people write it, in milliseconds since the epoch.

    ISO 8601, local time unless it names a zone, or milliseconds of 13 digits (2001 to 2286), so that neither seconds nor a
    date without dashes is taken for milliseconds of 1970. Raises InvalidArgument, which shows the forms.

    >>> parse_time("2026-01-31T12:00:00Z") == parse_time("2026-01-31 14:00+02:00") == parse_time("1769860800000")
    True
    """
    try:
        return time_in_ms(int(text) if _MILLISECONDS.fullmatch(text) else datetime.fromisoformat(text))
    except ValueError:
        raise InvalidArgument(f"not a time: {text!r} (want {TIME_FORMS})") from None


def parse_start(text: str) -> Literal["earliest", "latest"] | MessageId | int:
    """A start position as people write it. Raises InvalidArgument, which shows the forms.

    >>> parse_start("7:3:1"), parse_start("latest"), parse_start("1970-01-01T00:00:01Z")
    (MessageId(ledger=7, entry=3, index=1, partition=-1), 'latest', 1000)
    """
    if text.lower() == "earliest":
        return "earliest"
    if text.lower() == "latest":
        return "latest"
    with contextlib.suppress(InvalidArgument):
        return MessageId.parse(text)
    try:
        return parse_time(text)
    except InvalidArgument:
        raise InvalidArgument(
            f"not a position: {text!r} (want earliest, latest, a message id ledger:entry:index, or a time: {TIME_FORMS})"
        ) from None
