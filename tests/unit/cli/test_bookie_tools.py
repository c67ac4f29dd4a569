"""What `magnetar bookie` makes of its arguments, and of what brokers write into entries."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from magnetar.bookie.offline.entry_logs import StoredEntry
from magnetar.broker.cursors.core.acks import acked_numbers
from magnetar.broker.cursors.entries import encode_acks
from magnetar.cli.bookie_tools.read import decode_payload, parse_range, read
from magnetar.cli.bookie_tools.target import Target
from magnetar.cli.bookie_tools.tools import RunningTool
from magnetar.cli.wiring.flags import UsageError, is_daemon, parse_flags
from magnetar.proto.batch import encode_batch
from magnetar.proto.entry import encode_entry
from magnetar.proto.errors import InvalidArgument, MagnetarError, RequestTimeout


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", (0, None)), ("7", (7, 7)), ("7-9", (7, 9)), ("7-", (7, None)), ("0-0", (0, 0))],
)
def test_ranges(text: str, expected: tuple[int, int | None]) -> None:
    assert parse_range(text) == expected


@pytest.mark.parametrize("text", ["-", "9-7", "x", "1-2-3", "-5", "1.5", str(2**64), "٣"])
def test_what_is_no_range(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_range(text)
    assert "not a range of entries" in capsys.readouterr().err


async def test_rule_08_a_damaged_entry_is_shown_as_damaged_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = StoredEntry(1, 0, "entry log", "log", 64, -1, -1, b"", "the record is damaged")._asdict()

    def answer(_: RunningTool, question: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        assert (question, arguments) == ("read", {"ledger": 1, "first": 0, "last": None})
        yield entry

    monkeypatch.setattr(RunningTool, "rows", answer)
    with pytest.raises(SystemExit) as ended:
        await read(Target(bookie="127.0.0.1:1"), 1)
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "1:0  DAMAGED: the record is damaged" in out
    assert "1 of them damaged" in out


def test_messages_of_an_entry() -> None:
    batch = encode_batch([b"1", None], sequence_id=5, publish_time_ms=9, keys=["k", None])
    data = encode_entry(
        [batch, encode_batch([b"\xff"], sequence_id=7, publish_time_ms=9)],
        [2, 1],
        [1, 0],
        ["p", "q"],
        first_index=10,
        append_time_ms=99,
    )
    content = decode_payload(data)
    assert (content["kind"], content["first_index"], content["producers"]) == ("messages", 10, ["p", "q"])
    assert [(one["index"], one["producer"], one["sequence_id"]) for one in content["messages"]] == [
        (0, "q", 5),
        (1, "q", 6),
        (2, "p", 7),
    ]
    assert [one.get("value", one.get("value_base64")) for one in content["messages"]] == ["1", None, "/w=="]
    assert content["messages"][0]["key"] == "k"


def test_an_entry_of_a_cursor_ledger() -> None:
    start, end = acked_numbers(4, 0, 5, 9)
    assert decode_payload(encode_acks((1, 2, 3), [(1, [start], [end])])) == {
        "kind": "cursor acknowledgements",
        "content": {"mark_delete": [1, 2, 3], "ranges": [[1, 4, 0, 4, 5]]},
    }


@pytest.mark.parametrize("payload", [b"", b"hello", b"\x01", b"\x02short", b"\x01\xc1", bytes(100)])
def test_what_is_neither_is_unknown(payload: bytes) -> None:
    assert decode_payload(payload)["kind"] == "unknown"


def test_a_subcommand_that_comes_too_late_is_told_so() -> None:
    with pytest.raises(UsageError, match="a subcommand comes first: magnetar bookie verify"):
        parse_flags("bookie", ["--data", "x", "verify"])
    with pytest.raises(UsageError, match="see magnetar broker --help"):
        parse_flags("broker", ["verify"])


@pytest.mark.parametrize(
    ("line", "daemon"),
    [
        (["bookie"], True),
        (["bookie", "--data", "x"], True),
        (["bookie", "verify"], False),
        (["bookie", "verfy"], False),
        (["bookie", "--help"], False),
        (["broker", "x"], True),
        (["topics"], False),
        ([], False),
    ],
)
def test_a_bookie_alone_or_with_flags_is_the_daemon(line: list[str], daemon: bool) -> None:
    assert is_daemon(line) is daemon


@pytest.mark.parametrize("error", [InvalidArgument("no such log"), RequestTimeout("the disk hangs")])
def test_what_a_running_bookie_answers_in_the_middle_is_its_own_error(
    monkeypatch: pytest.MonkeyPatch, error: MagnetarError
) -> None:
    """Regression: since these are a ValueError and an OSError as well, they became "no bookie answers there"."""
    lines = [b'{"entry": 1}', json.dumps({"error": error.message, "code": error.code}).encode()]
    tool = RunningTool("127.0.0.1:1")
    monkeypatch.setattr(tool, "_open", lambda *_, **__: contextlib.nullcontext(lines))
    rows = tool.rows("entrylog")
    assert next(rows) == {"entry": 1}
    with pytest.raises(type(error), match=f"^{error.message}$"):
        next(rows)
