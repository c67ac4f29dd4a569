"""The decisions of a ZooKeeper session: scenarios with the clock in hand, and many random runs."""

from __future__ import annotations

import random

import pytest

from magnetar.metadata.zookeeper.core.session import (
    Act,
    Dial,
    End,
    Ended,
    Event,
    Heard,
    Instruction,
    Introduce,
    Introduced,
    SessionCore,
    Signal,
    State,
)

GRANTED = Introduced(7, b"secret", 6.0)


class Run:
    """A core, and what it said, in time."""

    def __init__(self, hosts: int = 3, timeout_s: float = 6.0) -> None:
        self.core = SessionCore(hosts, timeout_s, lambda: 0.5)
        self.now = 0.0

    def at(self, now: float, *events: Event) -> list[Instruction]:
        """Hands over events at a time; all instructions."""
        self.now = now
        said: list[Instruction] = []
        for event in events:
            said += self.core.handle(event, now)
            self.core.check()
        return said

    def wake(self) -> list[Instruction]:
        """The timer is due."""
        return self.at(self.core.wake_at, Signal.WOKEN)


def connected() -> Run:
    run = Run()
    assert run.at(0, Signal.STARTED) == [Dial(0)]
    assert run.at(0.01, Signal.OPENED) == [Introduce(0, b"", 6.0)]
    assert run.at(0.02, GRANTED) == [Act.ATTACHED]
    return run


def test_pings_prove_that_the_session_is_alive() -> None:
    run = connected()
    assert run.core.fence_at == pytest.approx(0.01 + 4), "from when the first frame was sent"
    assert run.wake() == [Act.PING]
    assert run.now == pytest.approx(1.01)
    assert run.at(1.4, Heard(pong=True)) == []
    assert run.core.fence_at == pytest.approx(1.01 + 4), "from when the ping was sent, not from its answer"
    assert run.core.wake_at == pytest.approx(2.01)


def test_requests_prove_it_too_and_spare_the_pings() -> None:
    run = connected()
    for tick in range(1, 100):
        sent_at = tick * 0.5
        assert run.at(sent_at + 0.1, Heard(sent_at), Signal.WOKEN) == []
    assert run.core.fence_at == pytest.approx(49.5 + 4)


def test_a_silent_connection_is_given_up_in_time_for_another_host() -> None:
    run = connected()
    assert run.wake() == [Act.PING]
    assert run.wake() == [Act.DETACHED, Act.DROP, Dial(1)]
    assert run.now == pytest.approx(1.01 + 1.5)
    assert run.wake() == [Act.DROP, Dial(2)], "that one does not answer either"
    assert run.at(run.now + 0.1, Signal.OPENED) == [Introduce(7, b"secret", 6.0)], "the same session"
    assert run.at(run.now + 0.1, GRANTED) == [Act.ATTACHED]
    assert run.core.fence_at == pytest.approx(run.now - 0.1 + 4)


def test_rule_31_the_fence_comes_first_whatever_else_is_there() -> None:
    for event in (Signal.WOKEN, Heard(3.9, pong=True), Signal.CONNECTION_LOST, Signal.CLOSE_ASKED):
        run = connected()
        assert run.at(4.01, event) == [Act.CLOSE_SESSION, Act.DETACHED, Act.DROP, Ended(End.FENCED)]
        assert run.core.why is End.FENCED
        assert run.at(4.02, Signal.OPENED, GRANTED, Heard(4.0), Signal.CLOSE_ASKED) == [], "for good"


def test_rule_31_a_session_that_is_suspended_is_fenced() -> None:
    run = connected()
    assert run.at(0.5, Signal.CONNECTION_LOST) == [Act.DETACHED, Act.DROP, Dial(1)]
    said: list[Instruction] = []
    while run.core.state is not State.ENDED:
        said += run.wake()
    assert run.now == pytest.approx(4.01)
    assert said[-1] == Ended(End.FENCED)


def test_a_round_of_failures_is_followed_by_a_pause_that_grows() -> None:
    run = Run(hosts=2)
    run.at(0, Signal.STARTED)
    pauses = []
    for _ in range(8):
        assert run.at(run.now, Signal.DIAL_FAILED) == [Dial(1)]
        assert run.at(run.now, Signal.DIAL_FAILED) == []
        before = run.now
        assert run.wake() == [Dial(0)]
        pauses.append(run.now - before)
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(0.05 * 0.75)
    assert pauses[-1] == pytest.approx(1.0 * 0.75)


def test_hosts_that_take_the_session_and_break_off_are_not_dialed_without_pause() -> None:
    run = Run(hosts=2)
    run.at(0, Signal.STARTED)
    pauses = 0
    for _ in range(40):
        if run.core.state is State.WAITING:
            pauses += 1
            run.wake()
        run.at(run.now, Signal.OPENED)
        run.at(run.now, GRANTED)
        run.at(run.now + 0.001, Signal.CONNECTION_LOST)
    assert pauses == 19
    assert run.now > 8
    run.wake()
    run.at(run.now, Signal.OPENED, GRANTED)
    run.at(run.now + 1, Signal.CONNECTION_LOST)
    assert run.core.state is State.DIALING, "that one had lasted"


def test_the_servers_do_not_know_the_session_any_more() -> None:
    run = connected()
    run.at(0.5, Signal.CONNECTION_LOST, Signal.OPENED)
    assert run.at(0.6, Introduced(0, bytes(16), 0.0)) == [Act.DROP, Ended(End.EXPIRED)]


def test_closing() -> None:
    run = connected()
    assert run.at(1, Signal.CLOSE_ASKED) == [Act.CLOSE_SESSION]
    assert run.at(1, Signal.CLOSE_ASKED) == []
    assert run.at(1.1, Signal.CLOSE_ANSWERED) == [Act.DETACHED, Act.DROP, Ended(End.CLOSED)]
    run = connected()
    run.at(1, Signal.CLOSE_ASKED)
    assert run.wake() == [Act.DETACHED, Act.DROP, Ended(End.CLOSED)], "no answer"
    assert run.now == pytest.approx(2.5)
    run = connected()
    run.at(3, Signal.CLOSE_ASKED)
    assert run.at(4.01, Signal.WOKEN) == [Act.DETACHED, Act.DROP, Ended(End.CLOSED)], (
        "its owner ended it, and did not lose it"
    )
    run = Run()
    run.at(0, Signal.STARTED)
    assert run.at(1, Signal.CLOSE_ASKED) == [Act.DROP, Ended(End.CLOSED)]


def test_late_events_of_an_earlier_transport_change_nothing() -> None:
    run = connected()
    assert run.at(0.1, Signal.OPENED, Signal.DIAL_FAILED, GRANTED, Signal.CLOSE_ANSWERED) == []
    assert run.core.state is State.CONNECTED


@pytest.mark.parametrize("seed", range(300))
def test_rule_31_no_owner_believes_in_a_session_that_the_servers_ended(seed: int) -> None:
    """A network that loses and delays, servers that count from the receipt: lost here before ended there."""
    rng = random.Random(seed)
    timeout_s = rng.choice([1.0, 4.0, 30.0])
    core = SessionCore(rng.randint(1, 3), timeout_s, rng.random)
    now, received_at = 0.0, -1e9  # when the servers heard of the session last
    queue: list[tuple[float, Event]] = [(0.0, Signal.STARTED)]
    ended_at = None
    for _ in range(400):
        queue.sort(key=lambda entry: entry[0])
        event: Event = Signal.WOKEN
        due = core.wake_at
        if queue and queue[0][0] <= due:
            due, event = queue.pop(0)
        now = max(now, due) + rng.choice(
            [0, 0, 0, 0.001, rng.random() * timeout_s / 5, rng.expovariate(1 / timeout_s)]
        )
        if now > 1e9:
            break
        told = core.why
        for instruction in core.handle(event, now):
            there = now + rng.random() * timeout_s / 10
            back = there + rng.random() * timeout_s / 10
            lost = rng.random() < 0.3
            known = ended_at is None and there < received_at + timeout_s
            match instruction:
                case Dial():
                    queue = [entry for entry in queue if entry[1] is Signal.CLOSE_ASKED]
                    queue.append((back, Signal.DIAL_FAILED if lost else Signal.OPENED))
                case Introduce(session_id):
                    if lost:
                        queue.append((back, Signal.CONNECTION_LOST))
                    elif session_id and not known:
                        queue.append((back, Introduced(0, b"", 0.0)))
                    else:
                        received_at = there
                        queue.append((back, Introduced(7, b"", timeout_s)))
                case Act.PING if not lost:
                    received_at = max(received_at, there)
                    queue.append((back, Heard(pong=True)))
        core.check()
        if core.state is State.ENDED:
            if told is None:
                ended_at = now
            break
        if core.session_id:
            fence = core.fence_at
            assert fence <= received_at + timeout_s, (
                "an owner that asks now is told the truth until the fence"
            )
