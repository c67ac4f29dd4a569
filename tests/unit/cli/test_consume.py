"""Messages as `--format line` and `--format plain` print them."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from magnetar.cli.app import app
from magnetar.cli.commands import consume, perf
from magnetar.cli.commands.consume import topics_of
from magnetar.cli.commands.formats import SHOWN_BYTES, as_line, as_plain, encoder
from magnetar.cli.terminal.session import start_of
from magnetar.client import InvalidArgument, MessageId, TopicNotFound
from support.served_broker import connect_to, serving


class Message:
    """What the formats ask of a message."""

    def __init__(self, value: bytes | None, key: str | bytes | None = None, **properties: str) -> None:
        self.id = MessageId(7, 3, 1)
        self.value = value
        self.key = key
        self.properties = properties
        self.publish_time = 1769860800123


def line(value: bytes | None, key: str | bytes | None = None, **properties: str) -> str:
    message: Any = Message(value, key, **properties)
    return as_line(message).decode()


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC0")
        time.tzset()
        yield
    time.tzset()


def test_a_line_for_people() -> None:
    head = "7:3:1  2026-01-31 12:00:00.123"
    assert line(b"h\xc3\xa9llo") == f"{head}  h\u00e9llo"
    assert line(b'{"n": 1}', "AA", run="7", host="x") == f'{head}  key=AA  {{run=7, host=x}}  {{"n": 1}}'
    assert line(None, b"\xff") == f"{head}  key=\\xff  (no value)"
    assert line(b"", "") == f"{head}  key=  (empty)"


def test_nothing_of_a_message_reaches_the_terminal_as_a_command() -> None:
    hostile = "\x1b[2J\x1b]0;title\x07\r\n\x9b31m\u202e\u2028\x00"
    shown = line(hostile.encode() + b"\xff\xfe", hostile, **{hostile: hostile})
    assert shown.isprintable()
    assert shown.endswith(r"\x1b[2J\x1b]0;title\x07\r\n\x9b31m\u202e\u2028\x00\xff\xfe")
    message: Any = Message(b"value", "k")
    assert as_line(message, dim=True) == (b"\x1b[2m7:3:1  2026-01-31 12:00:00.123  key=k\x1b[0m  value")


def test_a_large_value_does_not_flood_the_terminal() -> None:
    shown = line(b"x" * 5_000_000)
    assert len(shown) < SHOWN_BYTES + 100
    assert shown.endswith("xxx... (5,000,000 bytes; --format plain writes all)")


def test_a_publish_time_that_no_calendar_has() -> None:
    message: Any = Message(b"v")
    message.publish_time = (1 << 63) - 1
    assert as_line(message) == b"7:3:1  9223372036854775807 ms  v"


@pytest.mark.parametrize(
    ("terminal", "environment", "expected"),
    [(False, {}, b"v"), (True, {}, b"\x1b[2m7"), (True, {"NO_COLOR": "1"}, b"7:3:1"), (True, {"TERM": "dumb"}, b"7:3:1")],
)  # fmt: skip
def test_what_is_chosen_without_a_flag(
    terminal: bool, environment: dict[str, str], expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    message: Any = Message(b"v")
    assert encoder(None)(message).startswith(expected)
    assert encoder("plain") is as_plain


def test_a_pattern_is_one_regular_expression() -> None:
    assert topics_of(["a", "b"], pattern=False) == ["a", "b"]
    assert topics_of(["a.*"], pattern=True) == re.compile("a.*")
    with pytest.raises(InvalidArgument, match="takes one regular expression, not 2"):
        topics_of(["a", "b"], pattern=True)
    with pytest.raises(InvalidArgument, match="not a regular expression"):
        topics_of(["a("], pattern=True)


# --- templates -------------------------------------------------------------------------------------------------------


class Full(Message):
    """With all that a template can ask for."""

    topic = "persistent://public/default/t"
    event_time = None
    redelivery_count = 3
    sequence_id = 9
    producer_name = "p"


def filled(template: str, message: Any = None) -> bytes:
    given: Any = message or Full(b"v\xff", "k", shop="7", **{"a b]": "x"})
    return encoder(template)(given)


def test_a_template_is_filled_with_fields_of_the_message() -> None:
    assert filled("{id} {key}={value}") == b"7:3:1 k=v\xff"
    assert filled("{properties[shop]}{properties[a b]]}{properties[none]}|{event_time}|") == b"7x||"
    assert filled("{topic} {publish_time} {redelivery_count} {sequence_id} {producer_name}") == (
        b"persistent://public/default/t 1769860800123 3 9 p"
    )
    assert filled("{{{value}}}") == b"{v\xff}"
    assert filled(r"{key}\t\\\n\x") == b"k\t\\\n\\x"
    assert filled("{key}|{value}", Full(None)) == b"|"
    assert filled("{key}", Full(b"", b"\xff")) == b"\xff"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{keys}", "has no field 'keys' (want id, topic, key, value"),
        ("{}", "has no field ''"),
        ("{0}", "has no field '0'"),
        ("{properties}", "has no field 'properties'"),
        ("{properties[]}", "has no field"),
        ("{value.__class__}", "has no field 'value.__class__'"),
        ("{delivery[entry]}", "has no field"),
        ("{value!r}", "leave out what follows its name 'value'"),
        ("{publish_time:%Y}", "leave out what follows its name 'publish_time'"),
        ("{value", "write {{ for a brace itself"),
        ("value}{", "write {{ for a brace itself"),
        ("csv", "neither plain, line or json nor a template"),
    ],
)
def test_a_wrong_template_is_refused_before_anything_is_received(template: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(says)):
        encoder(template)


def test_what_a_template_shows_on_a_terminal_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    hostile = "\x1b[2J"
    message = Full(hostile.encode() + b"\xff", hostile, a=hostile)
    assert filled("{key} {value} {properties[a]}", message) == rb"\x1b[2J \x1b[2J\xff \x1b[2J"


def test_a_pattern_that_is_none_is_one_line_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["consume", "a(", "--pattern", "--subscription", "s"], standalone_mode=False)
    assert "not a regular expression: 'a('" in capsys.readouterr().err


# --- beginnings and ends ---------------------------------------------------------------------------------------------


def consuming(url: str, topic: str, *, follow: bool) -> Coroutine[Any, Any, None]:
    return consume.consume(
        [topic], "s", start="earliest", timeout=0.1, follow=follow, format="plain", url=url
    )


async def test_no_follow_of_a_topic_that_does_not_exist_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with serving() as server, connect_to(server) as client:
        url = f"magnetar://127.0.0.1:{server.addresses[0][1]}"
        with pytest.raises(TopicNotFound):
            await consuming(url, "none", follow=False)
        with pytest.raises(TopicNotFound):
            await client.admin.topic_stats("none")
        await client.admin.create_topic("some")
        await consuming(url, "some", follow=False)
        assert "subscription s of some is new; messages are kept for it" in capsys.readouterr().err
        await consuming(url, "some", follow=True)
        assert capsys.readouterr().err == "", "it is there already"


def test_a_start_may_be_a_while_ago() -> None:
    ago = start_of("-1h")
    assert isinstance(ago, int)
    assert abs(time.time() * 1000 - 3_600_000 - ago) < 600_000
    with pytest.raises(SystemExit):
        start_of("-1")


async def test_the_age_of_a_backlog_is_no_latency() -> None:
    async with serving() as server, connect_to(server) as client:
        async with client.create_producer("t") as producer:
            await producer.send_many([b""] * 10)
        await asyncio.sleep(0.01)
        answer = await perf.tail(client, "t", start="earliest", messages=10)
        assert "no latency, since all were published before it began" in str(answer.shown)
