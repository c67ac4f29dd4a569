"""`magnetar bookie read`: entries of a ledger of a running bookie, as text, hex, bytes or the messages in them."""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from magnetar.proto.errors import EntryNotFound, MagnetarError, MalformedFrame, StorageFailed
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.quantities import counted

from ..terminal.session import EXIT_FAILED, EXIT_USAGE, exclusive, fail, print_json
from .target import LOOK, JsonLines, Target, tool

Row = dict[str, Any]
if TYPE_CHECKING:
    from magnetar.proto.entry import Entry

read_app = typer.Typer()

_RANGE = re.compile(r"([0-9]+)(?:(-)([0-9]*))?")
_MAX_ID = 2**63 - 1
_HEX_LINE = 16
# Of a payload that is shown as text.
_TEXT_BYTES = 1000


@tool(read_app, "read", LOOK, json=JsonLines)
async def read(
    target: Target,
    ledger: Annotated[int, typer.Argument(min=0, metavar="LEDGER")],
    entries: Annotated[
        str, typer.Argument(metavar="FIRST[-LAST]", help="Entry ids; all without it.", show_default=False)
    ] = "",
    as_hex: Annotated[bool, typer.Option("--hex", help="Payloads as a hex dump.")] = False,
    messages: Annotated[
        bool, typer.Option("--messages", help="Decode what Magnetar's brokers wrote, down to the messages.")
    ] = False,
    raw: Annotated[
        str | None,
        typer.Option("--raw", help="Write the payloads, one after another, to this file.", metavar="FILE"),
    ] = None,
    as_json: bool = False,
) -> None:
    """Entries of a ledger, if the bookie runs: header, digest check, payload. Exit code 1 if one is damaged."""
    first, last = parse_range(entries)
    exclusive({"--hex": as_hex, "--messages": messages})
    async with target.any() as bookie:
        shown = damaged = 0
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(_open_output(raw)) if raw is not None else None
            for entry in bookie.rows("read", ledger=ledger, first=first, last=last):
                entry["data"] = base64.b64decode(entry["data"])
                shown += 1
                damaged += bool(entry["damage"])
                payload = entry["data"][LEDGER_ENTRY_HEADER_BYTES:]
                if output is not None and not entry["damage"]:
                    output.write(payload)
                if as_json:
                    print_json(_record(entry, payload, as_hex, messages, with_payload=output is None))
                else:
                    _print(entry, payload, as_hex, messages, with_payload=output is None)
        if not shown:
            _explain_nothing(bookie.row("ledgers", ledger=ledger), first, last)
    if not as_json:
        print(counted(shown, "entry", "entries") + (f", {damaged:,} of them damaged" if damaged else ""))
    if damaged:
        raise SystemExit(EXIT_FAILED)


def parse_range(text: str) -> tuple[int, int | None]:
    """`7`, `7-9`, `7-` or nothing: (first, last); last None is the end. Ends the process for anything else."""
    if not text:
        return 0, None
    found = _RANGE.fullmatch(text)
    if found is None:
        fail(f"not a range of entries: {text!r} (want 7, 7-9 or 7-)", EXIT_USAGE)
    first = int(found[1])
    last = first if found[2] is None else int(found[3]) if found[3] else None
    if max(first, last or 0) > _MAX_ID or (last is not None and last < first):
        fail(f"not a range of entries: {text!r} (the first comes before the last)", EXIT_USAGE)
    return first, last


def _open_output(path: str) -> IO[bytes]:
    try:
        return open(path, "wb")
    except OSError as error:
        raise StorageFailed(f"cannot write {path}: {error.strerror}") from None


def _explain_nothing(ledger: Row, first: int, last: int | None) -> NoReturn:
    """Raises EntryNotFound, which says what there is."""
    here = " ".join(f"{begin}-{end}" for begin, end in ledger["ranges"][:10])
    if last == first:
        wanted = f"no entry {first}"
    else:
        wanted = f"none of the entries from {first} to {'the end' if last is None else last}"
    more = " ..." if len(ledger["ranges"]) > 10 else ""
    raise EntryNotFound(
        f"ledger {ledger['ledger_id']} has {wanted} here; "
        + (f"here are {here}{more}" if here else "it has no entries here")
    )


# --- text ----------------------------------------------------------------------------------------------------------------


def _print(entry: Row, payload: bytes, as_hex: bool, messages: bool, *, with_payload: bool) -> None:
    name = f"{entry['ledger_id']}:{entry['entry_id']}"
    place = f"{entry['source']} {entry['path']}:{entry['position']}"
    damage = f"DAMAGED: {entry['damage']}" if entry["damage"] else "digest good"
    if not entry["data"]:
        print(f"{name}  {damage}  ({place})")
        return
    print(
        f"{name}  {len(payload)} bytes  LAC {entry['last_add_confirmed']}  "
        f"length {entry['ledger_length']}  {damage}  ({place})"
    )
    if not with_payload:
        return
    if as_hex:
        _print_hex(payload)
    elif messages:
        for line in _message_lines(payload):
            print(f"    {line}")
    else:
        shown = payload[:_TEXT_BYTES].decode(errors="backslashreplace")
        print("    " + _plain(shown) + (" ..." if len(payload) > _TEXT_BYTES else ""))


def _plain(text: str) -> str:
    """Without what would move the cursor of a terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _print_hex(payload: bytes) -> None:
    for start in range(0, len(payload), _HEX_LINE):
        part = payload[start : start + _HEX_LINE]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        print(f"    {start:08x}  {part.hex(' '):<{3 * _HEX_LINE}} {text}")


def _message_lines(payload: bytes) -> Iterator[str]:
    decoded = decode_payload(payload)
    if decoded["kind"] != "messages":
        yield f"{decoded['kind']}: {decoded.get('content', decoded.get('error', ''))}"
        return
    for message in decoded["messages"]:
        if "error" in message:
            yield f"[{message['index']}] {message['producer']}: {message['error']}"
            continue
        key = "" if message["key"] is None else f" key {message['key']!r}"
        value = message.get("value", message.get("value_base64"))
        yield f"[{message['index']}] {message['producer']}#{message['sequence_id']}{key}: {_plain(str(value))}"


# --- JSON ----------------------------------------------------------------------------------------------------------------


def _record(entry: Row, payload: bytes, as_hex: bool, messages: bool, *, with_payload: bool) -> Row:
    record = {name: value for name, value in entry.items() if name not in ("data", "damage")}
    record |= {"payload_bytes": len(payload), "damage": entry["damage"]}
    if with_payload and entry["data"]:
        if messages:
            record["content"] = decode_payload(payload)
        elif as_hex:
            record["payload_hex"] = payload.hex()
        else:
            record |= _text_or_base64("payload", payload)
    return record


def _text_or_base64(name: str, data: bytes | None) -> Row:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


# --- what Magnetar's brokers write ---------------------------------------------------------------------------------------


def decode_payload(payload: bytes) -> Row:
    """What a payload is: "messages" of a topic, "cursor ..." of a cursor, or "unknown" with the reason."""
    from magnetar.proto.entry import Entry

    try:
        entry = Entry(payload)
    except MagnetarError as error:
        return _decode_cursor(payload) or {"kind": "unknown", "error": error.message}
    try:
        return {
            "kind": "messages",
            "append_time_ms": entry.append_time_ms,
            "first_index": entry.first_index,
            "producers": entry.producer_names,
            "messages": list(_messages(entry)),
        }
    except (MagnetarError, IndexError) as error:
        return {"kind": "unknown", "error": str(error)}


def _messages(entry: Entry) -> Iterator[Row]:
    from magnetar.proto.batch import decode_batch

    names = entry.producer_names
    for position in range(entry.batch_count):
        index = entry.batch_start_index(position)
        try:
            batch = decode_batch(bytes(entry.batch(position)))
        except MalformedFrame as error:  # or it is encrypted, by a producer of Pulsar's protocol
            yield {"index": index, "producer": names[entry.producers[position]], "error": error.message}
            continue
        metadata = batch.metadata or {}
        sequence_ids = metadata.get(4)
        properties = metadata.get(1)
        for number, value in enumerate(batch.values):
            key = batch.keys[number] if batch.keys is not None else None
            message: Row = {
                "index": index + number,
                "producer": names[entry.producers[position]],
                "sequence_id": sequence_ids[number] if sequence_ids else batch.header.sequence_id + number,
                "publish_time_ms": batch.header.publish_time_ms,
                "key": key.decode(errors="replace") if isinstance(key, bytes) else key,
            }
            if properties is not None and properties[number]:
                message["properties"] = properties[number]
            yield message | _text_or_base64("value", value)


def _decode_cursor(payload: bytes) -> Row | None:
    from magnetar.broker.cursors.entries import describe

    try:
        return describe(payload)
    except MagnetarError:
        return None
