"""Settings stand once, in the options; times and positions are read as people write them, and as Python has them."""

import doctest
import inspect
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from magnetar.client import AutoFailover, Client, MessageId, RedeliveryBackoff, blocking, connect, options
from magnetar.client.options import (
    parse_start,
    parse_time,
    start_on_wire,
    time_in_ms,
)
from magnetar.proto.errors import InvalidArgument

NOON_UTC = 1769860800000  # 2026-01-31T12:00:00Z
HOUR = 3_600_000


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (connect, options.ClientOptions),
        (Client.create_producer, options.ProducerOptions),
        (Client.subscribe, options.ConsumerOptions),
        (Client.create_reader, options.ReaderOptions),
        (Client.create_table_view, options.TableViewOptions),
        (blocking.connect, options.ClientOptions),
        (blocking.Client.create_producer, options.ProducerOptions),
        (blocking.Client.subscribe, options.ConsumerOptions),
        (blocking.Client.create_reader, options.ReaderOptions),
        (blocking.Client.create_table_view, options.TableViewOptions),
    ],
)
def test_help_shows_each_option_and_its_default(call: Callable[..., Any], options: Any) -> None:
    parameters = dict(inspect.signature(call).parameters)
    parameters.pop("self", None)
    assert parameters == dict(inspect.signature(options).parameters)
    assert len(call.__doc__ or "") > 100


def test_durations_are_seconds_or_timedeltas() -> None:
    second = timedelta(seconds=1)
    assert options.ClientOptions("magnetar://h", operation_timeout=second).operation_timeout == 1.0
    assert options.ProducerOptions("t", send_timeout=2 * second).send_timeout == 2.0
    backoff = RedeliveryBackoff(min_delay=second, max_delay=4 * second)
    made = options.ConsumerOptions("t", "s", ack_timeout=5 * second, nack_backoff=backoff)
    assert made.ack_timeout == 5.0
    assert [backoff.delay(count) for count in range(4)] == [1.0, 2.0, 4.0, 4.0]
    clusters = AutoFailover(primary="magnetar://a", secondary=["magnetar://b"], check_interval=second)
    assert clusters.check_interval == 1.0
    with pytest.raises(InvalidArgument, match="send_timeout"):
        options.ProducerOptions("t", send_timeout=-second)


def test_the_blocking_client_has_the_names_of_the_asyncio_client() -> None:
    for name in ("Admin", "Client", "Producer", "Consumer", "Reader"):
        facade, original = getattr(blocking, name), getattr(__import__("magnetar.client").client, name)
        public = {key for key in dir(original) if not key.startswith("_")}
        internal = {"abort", "options", "closed", "admin"}
        internal |= {"pending_bytes"}
        assert public - internal <= set(dir(facade)), name
        for key in public - internal:
            assert getattr(facade, key).__doc__, key


@pytest.fixture(params=[("UTC0", 0), ("EST5", 5), ("IST-5:30", -5.5)])
def hours_behind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """This process lives in a zone that is so many hours behind UTC."""
    zone, hours = request.param
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        yield hours
    time.tzset()


def test_worked_cases() -> None:
    result = doctest.testmod(options)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("text", ["2026-01-31T12:00:00", "2026-01-31 12:00", "20260131T12"])
def test_a_time_without_a_zone_is_local_for_text_and_datetimes_alike(hours_behind: float, text: str) -> None:
    expected = NOON_UTC + round(hours_behind * HOUR)
    assert parse_time(text) == expected
    assert parse_start(text) == expected
    assert time_in_ms(datetime.fromisoformat(text)) == expected
    assert start_on_wire(datetime.fromisoformat(text)) == ("time", expected)


@pytest.mark.parametrize(
    "text", ["2026-01-31T12:00:00Z", "2026-01-31T14:00:00+02:00", "2026-01-31 06:30-05:30", str(NOON_UTC)]
)
def test_a_zone_is_honoured_wherever_this_process_lives(hours_behind: float, text: str) -> None:
    assert parse_time(text) == parse_start(text) == NOON_UTC
    aware = datetime(2026, 1, 31, 14, tzinfo=timezone(timedelta(hours=2)))
    assert start_on_wire(aware) == start_on_wire(NOON_UTC) == ("time", NOON_UTC)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("earliest", "earliest"),
        ("Latest", "latest"),
        ("7:3:1", MessageId(7, 3, 1)),
        ("7:3:1:2", MessageId(7, 3, 1, 2)),
    ],
)
def test_positions(text: str, place: object) -> None:
    assert parse_start(text) == place


@pytest.mark.parametrize(
    "text",
    ["", "yesterday", "7:3", "-1:0:0", f"{1 << 64}:0:0", "12:00", "2026-13-01", "0001-01-01T00:00:00",
     "1969-12-31T00:00:00Z", "-5", "1.5", "0", "1769860800", "20260131120000", "9" * 30, "9" * 5000],
)  # fmt: skip
def test_what_is_no_position_is_told_with_the_forms(text: str) -> None:
    with pytest.raises(
        InvalidArgument, match=r"(?s)not a position: .*earliest, latest, a message id .* in local time"
    ):
        parse_start(text)
    if text:
        with pytest.raises(InvalidArgument, match=r"not a time: .* in local time"):
            parse_time(text)


@pytest.mark.parametrize("when", [datetime.min, datetime(1969, 1, 1, tzinfo=UTC), -1, True, 1.5, 1 << 63])
def test_times_that_no_message_has(when: object) -> None:
    with pytest.raises(InvalidArgument, match="not a time"):
        time_in_ms(when)
