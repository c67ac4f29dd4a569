"""Messages in chunks: text scenarios, and a Hypothesis machine against a model that knows every message as a whole."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from magnetar.proto.batch_extensions import Chunk
from magnetar.proto.chunks import MAX_GIVEN_BACK, Assembler, Unfinished
from support.chunk_scenario import run_scenario
from support.text_scenarios import check, scenario_files


@pytest.mark.parametrize("path", scenario_files("chunks"), ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    check(path, run_scenario)


MESSAGES = {
    (producer, number): 1 + (producer * 7 + number * 3) % 4 for producer in range(3) for number in range(4)
}


@st.composite
def _logs(draw: Any) -> list[tuple[int, int, int, bool]]:
    """(producer, message, index, last): each producer's chunks in order, some of them stored twice, some messages never
    finished."""
    queues = []
    for producer in range(3):
        rows: list[tuple[int, int, int, bool]] = []
        for number in range(draw(st.integers(0, 4))):
            count = MESSAGES[producer, number]
            sent = [(producer, number, index, index == count - 1) for index in range(count)]
            stop = draw(st.integers(0, count))
            if draw(st.booleans()):
                rows += sent[:stop]  # the connection broke here: everything goes again
            rows += sent if draw(st.integers(0, 4)) else sent[: count - 1]
        queues.append(rows)
    log = []
    while any(queues):
        queue = draw(st.sampled_from([queue for queue in queues if queue]))
        log.append(queue.pop(0))
    return log


def _chunk(producer: int, number: int, index: int, last: bool) -> tuple[str, Chunk, bytes]:
    # Ids collide between producers on purpose.
    return f"p{producer}", Chunk(b"message%d" % number, index, last), b"%d.%d.%d;" % (producer, number, index)


def _whole(producer: int, number: int) -> bytes:
    return b"".join(b"%d.%d.%d;" % (producer, number, index) for index in range(MESSAGES[producer, number]))


@settings(deadline=None)
@given(_logs(), st.integers(1, 3))
def test_every_finished_message_is_whole_and_every_chunk_is_accounted_for(
    log: list[tuple[int, int, int, bool]], max_messages: int
) -> None:
    _account(log, max_messages)


def _account(log: list[tuple[int, int, int, bool]], max_messages: int) -> None:
    """What is given back comes after half a minute, in order of its place and before what is new. Then all is done with.

    What nobody can finish is dropped by who knows what is still to come.
    """
    assembler = Assembler[int](max_messages, 1000, 60.0)
    now = 0.0
    replay: dict[int, float] = {}
    done: dict[int, str] = {}
    whole: list[tuple[str, bytes]] = []
    position = steps = 0
    while len(done) < len(log):
        steps += 1
        assert steps < 200 * len(log), "it comes to no end"
        now += 1.0
        if due := [place for place, due in replay.items() if due <= now]:
            place = min(due)
            del replay[place]
        elif position < len(log):
            place = position
            position += 1
        else:
            place = -1
        if place >= 0:
            producer, chunk, piece = _chunk(*log[place])
            added = assembler.add(producer, chunk, place, piece, now)
            if added.message is not None and added.message.finished:
                _finished(added.message, whole, done, log)
            for let_go in added.let_go:
                assert let_go.places
                if let_go.orphan and not any(
                    other < place and log[other][:2] == log[place][:2] for other in replay
                ):
                    done |= dict.fromkeys(let_go.places, "dropped")
                else:
                    replay |= {one: now + 30.0 for one in let_go.places if one not in done}
        for message in assembler.silent(now):
            assembler.touch(message, now)
            of = log[message.places[0]][:2]
            if position == len(log) and not any(log[other][:2] == of for other in replay):
                assembler.remove(message)
                done |= dict.fromkeys(message.places, "dropped")
        assembler.check()
    assert not assembler.unfinished
    assert not assembler.held_bytes
    sent = {(f"p{producer}", number) for producer, number, _, last in log if last}
    assert {(producer, value) for producer, value in whole} == {
        (producer, _whole(int(producer[1:]), number)) for producer, number in sent
    }, "every message whose last chunk is stored comes"


def _finished(
    message: Unfinished[int],
    whole: list[tuple[str, bytes]],
    done: dict[int, str],
    log: list[tuple[int, int, int, bool]],
) -> None:
    producer, chunk_id = message.key
    expected = _whole(int(producer[1:]), int(chunk_id[-1:]))
    assert b"".join(message.pieces) == expected
    assert sorted(log[place][2] for place in set(message.places)) == sorted(
        log[place][2] for place in message.places
    ), "a place stands there once"
    whole.append((producer, expected))
    done |= dict.fromkeys(message.places, "acknowledged")


def test_what_was_given_back_is_remembered_within_bounds() -> None:
    assembler = Assembler[int](10, 1000, 60.0)
    for number in range(2 * MAX_GIVEN_BACK):
        assembler.add("p", Chunk(number.to_bytes(8), 0, False), number, b"", 0.0)
        assembler.check()


def test_a_removed_message_leaves_nothing_in_memory() -> None:
    assembler = Assembler[int](10, 1000, 60.0)
    assembler.add("p", Chunk(b"8 bytes.", 0, False), 1, b"x" * 100, 0.0)
    assert assembler.held_bytes == 100
    assert not assembler.silent(59.0)
    (message,) = assembler.silent(60.0)
    assembler.touch(message, 60.0)
    assert not assembler.silent(119.0)
    assembler.remove(message)
    assert assembler.held_bytes == 0
    assert assembler.next_due is None


def _keeps_what_is_removed(patch: pytest.MonkeyPatch) -> None:
    """The memory of a message that is not wanted any more is kept."""
    patch.setattr(Assembler, "remove", lambda self, message: None)


def _chunks_by_id_alone(patch: pytest.MonkeyPatch) -> None:
    """Two producers may have drawn the same id."""
    add = Assembler.add
    patch.setattr(Assembler, "add", lambda self, producer, *given, **named: add(self, "", *given, **named))


def _a_chunk_is_a_message(patch: pytest.MonkeyPatch) -> None:
    """Each chunk ends its message."""
    add = Assembler.add
    patch.setattr(
        Assembler,
        "add",
        lambda self, producer, chunk, *given: add(self, producer, chunk._replace(last=True), *given),
    )


def _what_is_crowded_out_is_dropped(patch: pytest.MonkeyPatch) -> None:
    """What was let go for want of room is acknowledged."""
    no_room = Assembler._no_room
    patch.setattr(Assembler, "_no_room", lambda self, *given: no_room(self, *given)._replace(orphan=True))


@pytest.mark.parametrize(
    "plant",
    [_keeps_what_is_removed, _chunks_by_id_alone, _a_chunk_is_a_message, _what_is_crowded_out_is_dropped],
)
def test_planted_defects_are_noticed(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    @settings(
        deadline=None, database=None, max_examples=500, phases=[Phase.generate], report_multiple_bugs=False
    )
    @given(_logs(), st.integers(1, 3))
    def search(log: list[tuple[int, int, int, bool]], max_messages: int) -> None:
        _account(log, max_messages)

    with pytest.raises((AssertionError, ValueError)):
        search()
