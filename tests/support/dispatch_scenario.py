"""Text scenarios of dispatch: a command, `----`, and what the core asks its shell to do, then what stopped it.

    dispatch [reader] [SETTING=VALUE ...]   a subscription (or a reader's, not durable), at the start of ledger 1
    publish 2,1@50 [cached]          an entry of two batches, of 2 and 1 messages; the other one is due in 50 ms
    chunks x0,-,x1!@50 [cached]      an entry of batches of one message: chunk 0 of message x, no chunk, and x's last one
    keyed k,l,k@50 [cached]          an entry of batches of one message with these keys; k+l: a batch with two keys
    wait 50                          so many ms pass, and the topic releases what is due
    join a shared [PRIORITY] [0-32767 ...] | leave a | grant a 10 [BYTES] | full a | drained a
    ack a 1:0:0-2 ... | ack-through a 1:0:2 | nack a [1:0:0-2 ...] | hand-out a 1:0:0-2 ... | take-back a 1:0:1 ...
    done 1 [ENTRIES] | failed 1 ERROR            the read with that number
    stale 1 1:0:0                                the answer of a read that was cancelled, with that entry
    pause seek | seek 1:0:0 | resume seek | skip 1:0:0 | timer | roll-over | trim | evict
    reload [later]                   later: what is delayed is read back with `delays-known`
    terminate                        nothing follows what was published

Each answer ends with `= STOP, at READ POSITION`, and a consumer each: permits, pending messages, `blocked`.
"""

import itertools
from typing import Any

from magnetar.broker.cursors.core.acks import AckRange, Position
from magnetar.broker.dispatch.core.consumer import Delivery
from magnetar.broker.dispatch.core.instructions import (
    ActiveChanged,
    CancelReads,
    EndReached,
    Instruction,
    PassEntry,
    PassMessages,
    Pause,
    Read,
    ReportUnreadable,
    SkipEntry,
    WakeAt,
)
from magnetar.broker.settings import BrokerSettings
from magnetar.proto import errors
from magnetar.proto.batch_extensions import Chunk
from support.dispatch_kit import DispatchWorld, see
from support.text_scenarios import play


def run_scenario(text: str) -> str:
    """The text with the output parts as the core produces them."""
    world: DispatchWorld | None = None

    def run(command: str) -> list[str]:
        nonlocal world
        name, *arguments = command.split()
        if name == "dispatch":
            settings = [argument for argument in arguments if argument != "reader"]
            world = DispatchWorld(parse_settings(settings), durable="reader" not in arguments)
        else:
            assert world is not None
            tell(world, name, arguments)
        return answer(world)

    return play(text, run)


def parse_settings(arguments: list[str]) -> BrokerSettings:
    """`name=value`, whole numbers or words."""
    pairs = (argument.split("=") for argument in arguments)
    values: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in pairs}
    return BrokerSettings(**values)


def tell(world: DispatchWorld, name: str, arguments: list[str]) -> None:
    """One command."""
    first = arguments[0] if arguments else ""
    values = [batch.partition("@")[0] for batch in first.split(",")]
    delays = [batch.partition("@")[2] for batch in first.split(",")]
    times_ms = [world.now_ms + int(delay) if delay else None for delay in delays]
    match name:
        case "publish":
            publish(world, [int(count) for count in values], None, times_ms, cached="cached" in arguments)
        case "keyed":
            keys: list[str | list[str]] = [key.split("+") if "+" in key else key for key in values]
            counts = [len(key) if isinstance(key, list) else 1 for key in keys]
            publish(world, counts, keys, times_ms, cached="cached" in arguments)
        case "chunks":
            found = [None if one == "-" else parse_chunk(one) for one in values]
            publish(world, [1] * len(found), None, times_ms, found, cached="cached" in arguments)
        case "wait":
            world.wait(int(first))
        case "delays-known":
            world.delays_known()
        case "join":
            ranges = [one.split("-") for one in arguments[2:] if "-" in one]
            level = sum(int(one) for one in arguments[2:] if "-" not in one)
            world.join(first, arguments[1], level, [(int(begin), int(end)) for begin, end in ranges])
        case "leave":
            world.leave(first)
        case "grant":
            world.grant(first, *map(int, arguments[1:]))
        case "full" | "drained":
            world.set_writable(first, name == "drained")
        case "ack":
            world.acknowledge(first, [parse_row(row) for row in arguments[1:]])
        case "ack-through":
            world.acknowledge(first, [parse_row(arguments[1])], cumulative=True)
        case "nack":
            world.nack(first, [parse_row(row) for row in arguments[1:]])
        case "hand-out" | "take-back":
            rows = [parse_row(row) for row in arguments[1:]]
            world.hand_out(first, rows, taken_back=name == "take-back")
        case "done":
            world.answer_read(int(first), *map(int, arguments[1:]))
        case "failed":
            world.fail_read(int(first), getattr(errors, arguments[1])("it is so"))
        case "stale":
            ledger, entry, _ = parse_position(arguments[1])
            world.handle(world.core.read_done, int(first), [world.topic.ledgers[ledger][entry]], world.now_ms)
        case "pause":
            world.pause(Pause[first.upper()])
        case "resume":
            world.resume(Pause[first.upper()])
        case "seek":
            world.seek(parse_position(first))
        case "skip":
            world.skip(parse_position(first))
        case "timer":
            world.fire_timer()
        case "roll-over":
            world.roll_over()
        case "trim":
            world.trim()
        case "terminate":
            world.terminate()
        case "reload":
            world.reload(later="later" in arguments)
        case "evict":
            world.topic.in_cache.clear()
        case _:
            raise AssertionError(f"unknown command: {name}")


def parse_chunk(text: str) -> Chunk:
    """`x1!`: chunk 1 of message x, the last one."""
    return Chunk(text[0].encode() * 8, int(text[1:].rstrip("!")), text.endswith("!"))


def publish(
    world: DispatchWorld,
    counts: list[int],
    keys: list[str | list[str]] | None,
    times_ms: list[int | None],
    chunks: list[Chunk | None] | None = None,
    *,
    cached: bool,
) -> None:
    """An entry is confirmed."""
    key = world.topic.publish(counts, cached=cached, keys=keys, times_ms=times_ms, chunks=chunks or [])
    world.delays.add(key, counts, times_ms)
    world.drain()


def answer(world: DispatchWorld) -> list[str]:
    """What was asked for since the last command, and how things stand."""
    lines = [show(instruction) for instruction in world.done]
    world.done.clear()
    stop = world.core.stop.name.lower().replace("_", " ")
    blocked = ", blocked" if world.core.tracker.blocked_on_unacked_messages else ""
    position = ":".join(map(str, world.core.read_position))
    consumers = [
        f"{name} {one.available_permits}/{one.unacked_messages}"
        + (" blocked" if one.blocked_on_unacked_messages else "")
        for name, one in world.consumers.items()
    ]
    return [*lines, "; ".join([f"= {stop}{blocked}, at {position}", *consumers])]


def show(instruction: Instruction) -> str:
    """One line."""
    match instruction:
        case Delivery():
            seen = see(instruction)
            again = f", redelivery {seen.redelivery_count}" if seen.redelivery_count else ""
            return (
                f"deliver {seen.key[0]}:{seen.key[1]}:{show_indexes(seen.indexes)} to {seen.consumer}{again}"
            )
        case Read(read_id, key, max_bytes):
            return f"read {read_id}: {key[0]}:{key[1]}" + ("" if max_bytes == 1 else " and on")
        case CancelReads(read_ids):
            return f"cancel reads {' '.join(map(str, read_ids))}"
        case WakeAt(due_ms):
            return f"wake at {due_ms}"
        case ActiveChanged(consumer, active):
            return f"{consumer.name} is {'' if active else 'not '}active"
        case EndReached(consumer):
            return f"{consumer.name} is at the end"
        case PassEntry(key):
            return f"pass {key[0]}:{key[1]}"
        case PassMessages(key, ranges):
            indexes = [index for first, last in ranges for index in range(first, last + 1)]
            return f"pass {key[0]}:{key[1]}:{show_indexes(indexes)}"
        case SkipEntry(key, error):
            return f"skip {key[0]}:{key[1]}, {type(error).__name__}"
        case ReportUnreadable(key, error):
            return f"unreadable {key[0]}:{key[1]}: {type(error).__name__ if error else 'no more'}"
        case _:
            return "turn over"


def show_indexes(indexes: list[int]) -> str:
    """`0-2,4`."""
    runs: list[str] = []
    for _, group in itertools.groupby(enumerate(indexes), lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(runs)


def parse_position(text: str) -> Position:
    """`1:0:2`."""
    ledger, entry, index = map(int, text.split(":"))
    return (ledger, entry, index)


def parse_row(text: str) -> AckRange:
    """`1:0:2` or `1:0:2-5`."""
    position, _, last = text.partition("-")
    ledger, entry, index = parse_position(position)
    return (ledger, entry, index, int(last) if last else index)
