"""Rule 24 when the failure of a ledger is followed by others, or is the fault of what was appended."""

import asyncio
from typing import Any

from magnetar.broker.log.managed_ledger import State
from magnetar.proto.errors import MessageTooLarge, NotEnoughBookies, RequestTimeout
from magnetar.proto.ids import TopicName
from support.broker_kit import TOPIC, FakeClient, running_broker, settle
from support.fake_ledger import FakeLedgers, FakeReader, FakeWriter


async def test_rule_24_a_topic_is_not_fenced_by_its_own_recovery_that_failed_at_first() -> None:
    """The next attempt asked the writer again, which the recovery had fenced: the topic gave itself up to nobody."""
    ledgers = FailingRecovery(2)
    async with running_broker(ledgers, retry_initial_ms=1) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"0")
        await client.confirmed(1)
        writer = ledgers.writers[0]
        writer.fail_after = 1
        ledgers.fail_close.append(NotEnoughBookies("too few to close"))
        client.publish(b"1", first=1)
        await client.confirmed(2)
        assert ledgers.recoveries == 3


class FailingRecovery(FakeLedgers):
    """Recoveries that fence the ledger, and then fail."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.recoveries = 0

    async def open(self, ledger_id: int, *, recover: bool) -> FakeReader:
        if recover:
            self.recoveries += 1
            if self.recoveries <= self.failures:
                self.ledgers[ledger_id].fenced = True
                raise RequestTimeout("in recovery")
        return await super().open(ledger_id, recover=recover)


class Strict(FakeLedgers):
    """Bookies that take no entry of this topic."""

    async def create(self, **named: Any) -> FakeWriter:
        writer = await super().create(**named)
        if named["properties"]["kind"] == "topic":
            writer.failing = MessageTooLarge("raise [bookie] max_entry_bytes")
        return writer


async def test_an_entry_that_no_bookie_takes_does_not_roll_ledgers_for_ever() -> None:
    ledgers = Strict()
    async with running_broker(ledgers, retry_initial_ms=1) as broker:
        client = FakeClient(broker)
        await client.producer()
        topic = broker.topics[str(TopicName.parse(str(TOPIC)))]
        client.publish(b"too large for bookies")
        await settle(200)
        assert len([line for line in ledgers.log if line.startswith("create")]) <= 2
        assert topic.ledger.state in (State.FENCED, State.CLOSED)
        assert not client.receipts


class Failing(FakeLedgers):
    """Ledgers that can be made and not written, `times` in a row: bookies that are there, and refuse at once."""

    times = 0

    async def create(self, **named: Any) -> FakeWriter:
        writer = await super().create(**named)
        if named["properties"]["kind"] == "topic" and self.times:
            self.times -= 1
            writer.failing = NotEnoughBookies("refused")
        return writer


async def test_ledgers_that_fail_at_once_are_made_at_a_bounded_rate() -> None:
    ledgers = Failing()
    ledgers.times = 6
    async with running_broker(ledgers, retry_initial_ms=2) as broker:
        client = FakeClient(broker)
        await client.producer()
        loop = asyncio.get_running_loop()
        began = loop.time()
        client.publish(b"0")
        await client.confirmed(1)
        assert loop.time() - began > 0.9 * sum(0.002 * 2**n for n in range(6))
