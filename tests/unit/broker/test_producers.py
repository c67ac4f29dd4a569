"""Producer sessions: names, epochs, rule 33, failures, backpressure."""

from functools import partial
from typing import Any

import pytest

from magnetar.broker.topics.core.producers import Ask, Claim, Producers, ProducerSession, SessionState, Wait
from magnetar.proto import commands as c
from magnetar.proto.batch import GROUP_OVERHEAD_BYTES, encode_batch
from magnetar.proto.errors import (
    ChecksumMismatch,
    FrameTooLarge,
    InvalidArgument,
    MessageTooLarge,
    ProducerBusy,
    ProducerFenced,
    QuorumLost,
)
from magnetar.proto.frames import encode_frame
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers


async def test_generated_names_are_unique_over_restarts() -> None:
    from support.memory_metadata import MemoryMetadataStore

    metadata, names = MemoryMetadataStore(), list[str]()
    for _ in range(2):
        async with running_broker(None, metadata) as broker:
            client = FakeClient(broker)
            names += [(await client.producer(n))["name"] for n in range(3)]
    assert len(set(names)) == 6


async def test_rule_33_a_new_epoch_waits_until_nothing_of_the_old_one_can_land() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        old, new = FakeClient(broker), FakeClient(broker)
        await old.producer(name="p")
        old.publish(b"0")
        await old.confirmed(1)
        ledgers.hold = True
        old.publish(b"1", first=1)
        await settle()
        old.publish(b"2", first=2)
        opening = new.ask(c.CreateProducer, 1, "orders", "p", 1)
        await settle()
        assert not opening.done()
        old.publish(b"late", first=3)  # fenced at once: this one may not land
        ledgers.confirm(1)
        await settle()
        assert ledgers.writers[0].waiting
        assert not opening.done()
        ledgers.hold = False
        ledgers.confirm()
        assert (await opening)["epoch"] == 1
        new.publish(b"1", b"2", first=1, epoch=1)
        await new.confirmed(2)
        reader = FakeClient(broker)
        await reader.consumer(2, "", durable=False)
        assert await reader.received(5) == [b"0", b"1", b"2", b"1", b"2"]
        assert any(isinstance(frame, c.CloseProducer) for frame, _ in old.frames)


async def test_rule_33_after_a_lost_connection_too() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        old, new = FakeClient(broker), FakeClient(broker)
        await old.producer(name="p")
        old.publish(b"0")
        await old.confirmed(1)
        ledgers.hold = True
        old.publish(b"1", first=1)
        old.handler.connection_closed(None)
        opening = new.ask(c.CreateProducer, 1, "orders", "p", 0)
        await settle()
        assert not opening.done()
        ledgers.hold = False
        ledgers.confirm()
        assert (await opening)["epoch"] == 1


async def test_a_name_in_use_is_refused() -> None:
    async with running_broker() as broker:
        first, second = FakeClient(broker), FakeClient(broker)
        await first.producer(name="p")
        with pytest.raises(ProducerBusy):
            await second.producer(name="p")
        await first.ask(c.CloseProducer, 1)
        await second.producer(name="p")
        with pytest.raises(InvalidArgument, match="unknown access mode 'alone'"):
            await first.producer(name="q", access_mode="alone")
        await second.producer(name="x")  # supersedes what its id held
        await first.producer(name="p")


async def test_a_damaged_batch_fails_itself_and_what_follows_but_not_what_came_before() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        await client.producer()
        header = c.Send(0, 1, 0).encode()
        good = [encode_batch([b"%d" % n], sequence_id=n, publish_time_ms=0) for n in range(4)]
        good[2] = good[2][:-1] + b"?"
        client.bytes_received(b"".join(encode_frame(header, payload) for payload in good))
        client.publish(b"4", first=4)
        await client.confirmed(2)
        await settle()
        assert [(f.sequence_id, f.code) for f in client.failures] == [(2, ChecksumMismatch.code)]
        assert sum(row[1] for row in client.receipts) == 2
        answer = await client.producer(epoch=1)  # the same id again, under a new epoch
        client.publish(b"2", first=2, epoch=answer["epoch"])
        await client.confirmed(3)


async def test_groups_of_several_batches_are_stored_in_one_entry() -> None:
    async with running_broker(max_entry_bytes=100) as broker:
        client = FakeClient(broker)
        await client.producer()
        group = b"".join(
            encode_batch([b"a", b"b"], sequence_id=n, publish_time_ms=0) for n in range(0, 20, 2)
        )
        client.frame(c.Send(0, 1, 0), group)
        await client.confirmed(20)
        assert client.receipts == [(0, 20, client.receipts[0][2], 0, 0)]


async def test_sends_of_an_unknown_producer_or_epoch_are_answered() -> None:
    async with running_broker() as broker:
        client = FakeClient(broker)
        client.publish(b"x", first=5, producer_id=3)
        await client.producer()
        client.publish(b"x", first=6, epoch=9)
        assert [(f.producer_id, f.sequence_id, f.code) for f in client.failures] == [
            (3, 5, ProducerFenced.code),
            (1, 6, ProducerFenced.code),
        ]


async def test_a_group_too_large_is_refused() -> None:
    async with running_broker(max_message_bytes=1000) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"small", b"x" * 1000, b"x" * (1000 + GROUP_OVERHEAD_BYTES), b"after")
        await settle()
        assert [(f.sequence_id, f.code) for f in client.failures] == [(2, MessageTooLarge.code)]
        await client.confirmed(2)


async def test_a_full_budget_pauses_reading_and_draining_resumes_it() -> None:
    cases: list[dict[str, Any]] = [{"max_topic_publish_bytes": 2000}, {"memory_budget_bytes": 8000}]
    for settings in cases:
        ledgers = FakeLedgers()
        async with running_broker(ledgers, **settings) as broker:
            client, other = FakeClient(broker), FakeClient(broker)
            await client.producer()
            ledgers.hold = True
            for number in range(3):
                client.publish(b"x" * 1000, first=number)
                await settle(3)
            assert client.paused == {"publish"}
            assert not other.paused
            ledgers.hold = False
            ledgers.confirm()
            await client.until(lambda c=client: not c.paused)
            await client.confirmed(3)
            assert broker.publish_budget.used == 0
            ledgers.hold = True
            client.publish(b"x" * 2500, first=3)
            await settle()
            assert client.paused
            client.handler.connection_closed(None)
            assert broker.publish_budget.waiting == 0
            ledgers.hold = False
            ledgers.confirm()
            await settle()


async def test_two_topics_of_a_connection_wait_for_the_full_budget_of_the_broker() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, memory_budget_bytes=8000) as broker:
        client = FakeClient(broker)
        await client.producer(1, "orders")
        await client.producer(2, "invoices")
        ledgers.hold = True
        sends = [
            encode_frame(
                c.Send(0, producer_id, 0).encode(),
                encode_batch([b"x" * 2000], sequence_id=0, publish_time_ms=0),
            )
            for producer_id in (1, 2)
        ]
        client.bytes_received(b"".join(sends))
        await settle()
        assert client.paused == {"publish"}
        ledgers.hold = False
        ledgers.confirm()
        await client.confirmed(2)
        await settle()
        assert not client.paused
        assert broker.publish_budget.waiting == 0


class Port:
    """Notes its end."""

    peer: Any = None

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.closed = False

    def receipts(self, rows: Any) -> None:
        pass

    def send_failed(self, sequence_id: int, error: Any) -> None:
        pass

    def send_delayed(self, error: Any) -> None:
        pass

    def hold(self, reason: str) -> None:
        pass

    def producer_closed(self, error: Any) -> None:
        self.closed = True


def test_rule_33_of_several_that_wait_for_one_name_a_single_session_is_open_in_the_end() -> None:
    producers, drained = Producers("orders", 10_000), list[int]()

    def opened(claim: Claim) -> ProducerSession:
        session = producers.open(claim, Port)
        assert isinstance(session, ProducerSession)
        return session

    oldest = opened(Claim("p", 0))
    oldest.outstanding = 1
    claims = [Claim("p", epoch) for epoch in (1, 2, 3)]
    for number, claim in enumerate(claims[:2]):
        assert producers.open(claim, Port) == Wait(oldest)
        oldest.when_drained.append(partial(drained.append, number))
    producers.finished(oldest, 1)
    assert drained == [0, 1]
    first = opened(claims[0])
    first.outstanding = 1  # sent something at once, so that who comes next has to wait for it
    assert producers.open(claims[1], Port) == Wait(first)
    assert producers.open(claims[2], Port) == Wait(first)
    producers.finished(first, 1)
    sessions = [oldest, first, opened(claims[1]), opened(claims[2])]
    assert [s.state is SessionState.OPEN for s in sessions] == [False, False, False, True]
    assert [s.port.closed for s in sessions] == [True, True, True, False]  # type: ignore[attr-defined]
    assert [s.epoch for s in sessions] == [0, 1, 2, 3]


def test_a_name_is_free_when_its_holder_is_gone_and_nothing_of_it_is_queued() -> None:
    producers = Producers("orders", 10_000)
    session = producers.open(Claim("p", 0), Port)
    assert isinstance(session, ProducerSession)
    session.outstanding = 2
    claim = Claim("p", 0)
    assert producers.open(claim, Port) == Ask([session])
    producers.forget(session)  # its connection did not answer
    assert producers.open(claim, Port) == Wait(session)
    with pytest.raises(QuorumLost):
        producers.open(claim, Port)
    producers.finished(session, 2)
    assert not list(producers)
    again = producers.open(claim, Port)
    assert isinstance(again, ProducerSession)
    assert again.epoch == 1
    late = Claim("p", 1)
    assert producers.open(late, Port) == Ask([again])
    with pytest.raises(ProducerBusy):
        producers.open(late, Port)


async def test_a_producer_that_opens_again_does_not_wait_for_ever_for_what_it_sent_before() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers, producer_drain_timeout_ms=20) as broker:
        client = FakeClient(broker)
        await client.producer(name="p")
        client.publish(b"0")
        await client.confirmed(1)
        ledgers.hold = True
        client.publish(b"1", first=1)
        await settle()
        with pytest.raises(QuorumLost, match="producer_drain_timeout_ms=20"):
            await client.producer(name="p", epoch=1)
        ledgers.hold = False
        ledgers.confirm()
        await settle()
        assert (await client.producer(name="p", epoch=1))["epoch"] == 1


async def test_rule_42_receipts_fit_the_frames_of_a_peer_with_small_ones() -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        small, other = FakeClient(broker), FakeClient(broker)
        small.max_frame_bytes = 4096
        await small.producer(name="small")
        await other.producer(name="other")
        ledgers.hold = True
        for number in range(300):  # receipts of one wake-up: 300 rows of 32 bytes
            small.publish(b"%d" % number, first=number)
            other.publish(b"%d" % number, first=number)
        await settle()
        ledgers.hold = False
        ledgers.confirm()
        await small.confirmed(300)
        await other.confirmed(300)
        assert [row[0] for row in small.receipts] == list(range(300))
        assert broker.topics[str(TOPIC)].publish_budget.used == 0


async def test_rule_48_a_port_that_fails_costs_its_own_producer_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledgers = FakeLedgers()
    async with running_broker(ledgers) as broker:
        broken, other = FakeClient(broker), FakeClient(broker)
        await broken.producer(name="broken")
        await other.producer(name="other")
        send = broken.send

        def send_no_receipt(header: bytes, payload: Any = b"") -> None:
            if isinstance(c.decode_command(header), c.Receipt):
                raise FrameTooLarge("not even one row fits")
            send(header, payload)

        broken.send = send_no_receipt  # type: ignore[method-assign]
        ledgers.hold = True
        broken.publish(b"0")
        other.publish(b"0")
        await settle()
        ledgers.hold = False
        ledgers.confirm()
        await other.confirmed(1)
        topic = broker.topics[str(TOPIC)]
        assert topic.publish_budget.used == 0
        assert [session.name for session in topic.producers] == ["other"]
        assert isinstance(broken.frames[-1][0], c.CloseProducer)
    assert "its receipts could not be sent" in caplog.text
