"""The cores of a client in a cluster: service URLs, the search for an owner, who is tried when, which cluster is used."""

import doctest
import random
from types import ModuleType

import pytest

from magnetar.client import AutoFailover, InvalidArgument, connect, service_url
from magnetar.client.connection.core import failover, search
from magnetar.client.connection.core.failover import Failover
from magnetar.client.connection.core.reachability import MAX_ADDRESSES, Reachability
from magnetar.client.connection.core.search import MAX_REDIRECTS, Ask, Connect, Failed, Search
from magnetar.client.service_url import ServiceUrl, broker_address, parse_url
from magnetar.proto.errors import ConnectionLost

X, Y, Z = "magnetar://x:1", "magnetar://y:1", "magnetar://z:1"


@pytest.mark.parametrize("module", [service_url, search, failover])
def test_worked_cases(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# --- service URLs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("magnetar://a", [("a", 7650)]),
        ("magnetar://a:1/", [("a", 1)]),
        ("magnetar://a:7650,b:7651,[::1]:7652", [("a", 7650), ("b", 7651), ("::1", 7652)]),
        ("magnetar://a, b , a", [("a", 7650), ("b", 7650)]),
        ("magnetar://[fe80::1%eth0]", [("fe80::1%eth0", 7650)]),
        ("magnetar://broker-1.example.org:80", [("broker-1.example.org", 80)]),
    ],
)
def test_urls_with_hosts(url: str, hosts: list[tuple[str, int]]) -> None:
    parsed = parse_url(url)
    assert list(parsed.hosts) == hosts
    assert parse_url(str(parsed)) == parsed


def test_a_url_with_srv_records() -> None:
    assert parse_url("magnetar+srv://magnetar.example.org") == ServiceUrl(srv_name="magnetar.example.org")
    assert str(parse_url("magnetar+srv://example.org/")) == "magnetar+srv://example.org"


@pytest.mark.parametrize(
    "url",
    [
        "", "magnetar:/a", "magnetar://", "magnetar://a,", "magnetar://,a", "magnetar://a:b", "magnetar://a:0",
        "magnetar://a:65536", "magnetar://::1", "magnetar://[::1", "magnetar://a/b", "magnetar://a?b=c", "magnetar://u@a",
        "magnetar://a:1:2", "magnetar+srv://", "magnetar+srv://a:7650", "magnetar+srv://a,b", "magnetar+srv://a..b",
        "pulsar://a:6650", None, 5, b"magnetar://a", ["magnetar://a"], "magnetar://a b", "magnetar://a..b",
        f"magnetar://{64 * 'a'}", f"magnetar+srv://{64 * 'a'}",
    ],
)  # fmt: skip
def test_bad_urls_get_one_clear_error(url: object) -> None:
    with pytest.raises(
        InvalidArgument, match=r"not a service URL: .* \(want magnetar://host:port, .*srv://name\)"
    ):
        connect(url)  # type: ignore[arg-type]


def test_a_look_up_names_one_broker() -> None:
    assert broker_address("magnetar://[::1]:5") == ("::1", 5)
    for url in ("magnetar://a,b", "magnetar+srv://a"):
        with pytest.raises(InvalidArgument, match="does not name one broker"):
            broker_address(url)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"secondary": []}, "secondary is a list of service URLs"),
        ({"secondary": "magnetar://b"}, "secondary is a list of service URLs"),
        ({"secondary": ["b"]}, "not a service URL: 'b'"),
        ({"secondary": ["magnetar://a:7650"]}, "must differ"),
        ({"secondary": ["magnetar://b"], "check_interval": 0}, "check_interval must be greater than 0"),
        (
            {"secondary": ["magnetar://b"], "failover_delay": float("inf")},
            "failover_delay must be greater",
        ),
    ],
)
def test_bad_failover_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        AutoFailover(primary="magnetar://a", **settings)  # type: ignore[arg-type]


# --- the search for an owner ----------------------------------------------------------------------------------------------


def test_ten_answers_that_are_not_final_are_followed() -> None:
    found = Search()
    assert found.begin() == Ask()
    for number in range(MAX_REDIRECTS):
        assert found.answered(f"magnetar://{number}", False) == Ask(
            f"magnetar://{number}", authoritative=True
        )
    assert found.answered(X, True) == Connect(X)
    found = Search()
    found.begin()
    for _ in range(MAX_REDIRECTS):
        found.answered(X, False)
    assert found.answered(X, False) == Failed("10 brokers, one after another, sent this client on")


def test_an_owner_that_cannot_be_reached_is_reported_once() -> None:
    found = Search()
    found.begin()
    assert found.answered(X, True) == Connect(X)
    assert found.unreachable() == Ask(unreachable=X)
    assert found.answered(X, True) == Connect(X, again=True)  # it has come back, as the broker thinks
    assert found.unreachable() == Failed()


def test_each_of_several_failed_brokers_is_reported() -> None:
    found = Search()
    found.begin()
    found.answered(X, True)
    assert found.unreachable() == Ask(unreachable=X)
    assert found.answered(Y, False) == Ask(Y, authoritative=True)
    assert found.unreachable() == Ask(unreachable=Y)
    assert found.answered(Z, False) == Ask(Z, authoritative=True)
    assert found.answered(Z, True) == Connect(Z)


def test_without_anybody_to_ask_it_fails() -> None:
    found = Search()
    found.begin()
    assert found.unreachable() == Failed()


def test_what_is_known_is_used_first() -> None:
    found = Search()
    assert found.begin(Y) == Ask(Y, authoritative=True)
    assert found.unreachable() == Ask(unreachable=Y)


@pytest.mark.parametrize("seed", range(200))
def test_a_search_ends(seed: int) -> None:
    """Whatever the brokers say: at most ten are followed, and each URL is reported once."""
    rng = random.Random(seed)
    found = Search()
    step = found.begin()
    reported = []
    for _ in range(100):
        if isinstance(step, Failed):
            break
        if isinstance(step, Ask) and step.unreachable:
            reported.append(step.unreachable)
        if isinstance(step, Connect) or rng.random() < 0.4:
            step = found.unreachable()
        else:
            step = found.answered(rng.choice([X, Y, Z]), rng.random() < 0.3)
    assert isinstance(step, Failed)
    assert len(reported) == len(set(reported))


# --- who is tried when ----------------------------------------------------------------------------------------------------

A, B, C = ("a", 1), ("b", 1), ("c", 1)
ERROR = ConnectionLost("nobody there")


def test_a_broker_that_failed_is_left_alone_for_pauses_that_grow() -> None:
    known = Reachability(lambda: 0.999)
    assert known.refusal(A, 0.0) is None
    now, pauses = 0.0, []
    for _ in range(6):
        known.failed(A, now, 0.001, ERROR)
        began = now
        while known.refusal(A, now) is ERROR:
            now += 0.01
        pauses.append(now - began)
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0], abs=0.02)
    known.worked(A)
    assert known.refusal(A, now) is None
    known.failed(A, now, 10.0, ERROR)  # it hung
    assert known.refusal(A, now + 4.9) is ERROR
    assert known.refusal(A, now + 5.0) is None


def test_hosts_that_failed_come_behind_those_that_work() -> None:
    known = Reachability(lambda: 0.0)
    assert known.in_order([B, A, C]) == [B, A, C]
    known.failed(B, 1.0, 0.0, ERROR)
    known.failed(A, 2.0, 0.0, ERROR)
    assert known.in_order([A, B, C]) == [C, B, A]
    known.failed(B, 3.0, 0.0, ERROR)
    assert known.in_order([A, B, C]) == [C, A, B]
    known.worked(A)
    assert known.in_order([B, C, A]) == [C, A, B]


def test_what_is_remembered_is_bounded() -> None:
    known = Reachability(lambda: 0.0)
    for number in range(MAX_ADDRESSES + 5):
        known.failed(("h", number), 0.0, 0.0, ERROR)
    assert len(known._failures) == MAX_ADDRESSES
    assert known.refusal(("h", 4), 0.0) is None


# --- which cluster is used ------------------------------------------------------------------------------------------------


def decisions(clusters: int = 3) -> Failover:
    return Failover(clusters, failover_delay_s=10, switch_back_delay_s=20)


def test_one_answer_within_the_delay_starts_it_anew() -> None:
    core = decisions()
    assert not core.probed(0, {0: False})
    assert core.to_probe() == [0, 1, 2]
    assert not core.probed(9, {0: True, 1: True, 2: True})
    assert core.to_probe() == [0]
    assert not core.probed(10, {0: False})
    assert not core.probed(19, {0: False, 1: True, 2: True})
    assert core.probed(20, {0: False, 1: True, 2: True})
    assert core.in_use == 1


def test_it_goes_to_the_first_that_answers_and_stays_if_none_does() -> None:
    core = decisions()
    assert not core.probed(0, {0: False})
    assert not core.probed(100, {0: False, 1: False, 2: False})
    assert core.in_use == 0
    assert core.probed(101, {0: False, 1: False, 2: True})
    assert core.in_use == 2
    assert core.to_probe() == [0, 2]


def test_it_goes_back_when_the_primary_has_answered_for_long_enough_without_a_break() -> None:
    core = decisions()
    core.use(1)
    assert not core.probed(0, {0: True, 1: True})
    assert not core.probed(19, {0: False, 1: True})
    assert not core.probed(30, {0: True, 1: True})
    assert not core.probed(49, {0: True, 1: True})
    assert core.probed(50, {0: True, 1: True})
    assert core.in_use == 0


def test_a_secondary_that_fails_is_left_for_the_primary_first() -> None:
    core = decisions()
    core.use(1)
    assert not core.probed(0, {0: True, 1: False})
    assert core.probed(10, {0: True, 1: False, 2: True})
    assert core.in_use == 0
