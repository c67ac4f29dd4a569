"""The blocking facade, against a fake broker on a loop of its own thread."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from magnetar.client import AlreadyClosed, DeadLetterPolicy, MagnetarError, ReceiveTimeout, SequenceIdError
from magnetar.client.blocking import LoopThread, connect
from magnetar.proto.errors import RetryableError
from support.fake_broker import FakeBroker
from support.served_broker import serving


@pytest.fixture
def url() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    broker = asyncio.run_coroutine_threadsafe(FakeBroker.start(), loop).result()
    yield broker.url
    asyncio.run_coroutine_threadsafe(broker.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_same_names_without_await(url: str) -> None:
    before = threading.active_count()
    with connect(url) as client:
        with client.create_producer("t") as producer:
            first = producer.send(b"0", key="k")
            receipt = producer.send_nowait(b"1")
            ids = producer.send_many([b"2", b"3", b"4"])
            assert receipt.result(timeout=1.0) == first._replace(entry=1)
            producer.flush()
            assert receipt.done
        consumer = client.subscribe("t", "s", start="earliest")
        values = []
        for message in consumer:
            values.append(message.value)
            consumer.ack(message)
            if len(values) == 3:
                break
        assert consumer.receive(timeout=1.0).id == ids[1]
        batch = next(consumer.batches())
        assert [m.value for m in batch] == [b"4"]
        consumer.ack_cumulative(batch[-1], receipt=True)
        with pytest.raises(ReceiveTimeout):
            consumer.receive(timeout=0.01)
        consumer.seek(ids[0])
        assert consumer.receive(timeout=1.0).value == b"2"
        consumer.nack(consumer.receive(timeout=1.0))
        with client.create_reader("t", start="earliest") as reader:
            assert reader.has_message_available()
            assert [reader.read_next(1.0).value for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
            assert not reader.has_message_available()
        assert client.admin.list_topics() == ["persistent://public/default/t"]
        consumer.unsubscribe()
    assert threading.active_count() == before
    with pytest.raises(MagnetarError, match="closed"):
        client.admin.list_topics()


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.asyncio(loop_factories=["uvloop"])  # not in virtual time
async def test_rule_49_what_was_handed_out_counts_and_nothing_else(*, batched: bool) -> None:
    def use(url: str) -> list[int]:
        policy = DeadLetterPolicy(max_redeliver_count=3)
        with connect(url) as client:
            with client.create_producer("t") as producer:
                for _ in range(2):
                    producer.send_many([b"m"] * 10)
            consumer = client.subscribe("t", "s", type="shared", start="earliest", dead_letter=policy)
            for _ in range(2):
                consumer.receive(5.0)
            for taken, _ in enumerate(consumer, 1):
                if taken == 2:
                    break
            if batched:
                assert len(consumer.receive_batch() or ()) == 6
            consumer.close()
            consumer = client.subscribe("t", "s", type="shared", dead_letter=policy)
            return sorted(consumer.receive(5.0).redelivery_count for _ in range(20))

    async with serving() as server:
        counts = await asyncio.to_thread(use, f"magnetar://127.0.0.1:{server.addresses[0][1]}")
    assert counts == sorted([1] * (10 if batched else 4) + [0] * (10 if batched else 16))


def test_an_interrupt_of_receive_loses_no_message(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = LoopThread.wait

    def interrupted(self: LoopThread, coroutine: Any) -> Any:
        wait(self, coroutine)  # Ctrl-C just as it is done
        raise KeyboardInterrupt

    with connect(url) as client:
        with client.create_producer("t") as producer:
            producer.send_many([b"0", b"1"])
        with client.subscribe("t", "s", start="earliest") as consumer:
            with monkeypatch.context() as patch:
                patch.setattr(LoopThread, "wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    consumer.receive(5.0)
            assert [consumer.receive(5.0).value for _ in range(2)] == [b"0", b"1"]
            with pytest.raises(ReceiveTimeout):
                consumer.receive(0)


@pytest.mark.parametrize("how", ["receive_batch", "batches"])
def test_an_interrupt_while_a_batch_is_waited_for_loses_none(
    url: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    wait = LoopThread.wait

    def interrupted(self: LoopThread, coroutine: Any) -> Any:
        wait(self, coroutine)  # Ctrl-C just as it is done
        raise KeyboardInterrupt

    with connect(url) as client:
        with client.create_producer("t") as producer:
            producer.send_many([b"0", b"1"])
        with client.subscribe("t", "s", start="earliest") as consumer:
            with monkeypatch.context() as patch:
                patch.setattr(LoopThread, "wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    _ = consumer.receive_batch() if how == "receive_batch" else next(consumer.batches())
            assert [consumer.receive(5.0).value for _ in range(2)] == [b"0", b"1"]


def test_each_topic_goes_where_a_function_says(url: str) -> None:
    with connect(url) as client:
        ids = {}
        for name in ("a", "b", "c"):
            with client.create_producer(name) as producer:
                ids[f"persistent://public/default/{name}"] = producer.send_many([b"0", b"1", b"2"])
        with client.subscribe(["a", "b", "c"], "s", start="earliest") as consumer:
            assert len([consumer.receive(5.0) for _ in range(9)]) == 9
            consumer.seek(lambda topic: None if topic.endswith("/c") else ids[topic][1])
            again = [consumer.receive(5.0) for _ in range(4)]
            assert sorted((message.topic[-1], message.value) for message in again) == [
                ("a", b"1"), ("a", b"2"), ("b", b"1"), ("b", b"2")
            ]  # fmt: skip
            with pytest.raises(ReceiveTimeout):
                consumer.receive(0.05)


def test_messages_with_ids_and_times_of_their_own(url: str) -> None:
    with connect(url, max_pending_bytes=1 << 20) as client, client.create_producer("t", name="p") as producer:
        assert producer.last_sequence_id == -1
        producer.send_nowait(b"3", sequence_id=3, deliver_after=0.01).result()
        producer.send(b"5", sequence_id=5, deliver_at=datetime(2020, 1, 1))
        with pytest.raises(SequenceIdError):
            producer.send(b"5", sequence_id=5)
        producer.send_many([b"6", b"9"], sequence_ids=[6, 9], deliver_at=[None, datetime(2020, 1, 1)])
        assert producer.last_sequence_id == 9
        with client.create_reader("t", start="earliest") as reader:
            assert [reader.receive(timeout=1.0).sequence_id for _ in range(4)] == [3, 5, 6, 9]


def test_closing_what_the_client_has_closed_does_nothing(url: str) -> None:
    with connect(url) as client:
        opened: list[Any] = [
            client.create_producer("t"),
            client.subscribe("t", "s"),
            client.create_reader("t"),
        ]
    for one in [*opened, client]:
        one.close()


def test_calls_of_other_threads_end_when_the_client_is_closed(url: str) -> None:
    """Also those that wait for a moment at which they are tried again."""
    client = connect(url, backoff_first=60.0, backoff_max=60.0)
    asked = threading.Event()

    async def refuse(*_: Any, **__: Any) -> None:
        asked.set()
        raise RetryableError("not now")

    outcomes: list[str] = []

    def ask() -> None:
        with pytest.raises(AlreadyClosed) as caught:
            client.admin.topic_stats("t")
        outcomes.append(str(caught.value))

    client._inner._pool.to_topic = refuse  # type: ignore[method-assign, assignment]
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert asked.wait(10.0)
    client.close()
    thread.join(10.0)
    assert outcomes == ["the client was closed meanwhile; connect again"]


@pytest.mark.real
def test_in_a_forked_process_every_call_says_that_it_cannot_be_used_there(url: str) -> None:
    with connect(url) as client:
        producer = client.create_producer("t")
        producer.send_many([b"%d" % n for n in range(10)])
        consumer = client.subscribe("t", "s", start="earliest")
        iterator = iter(consumer)
        assert next(iterator).value == b"0"  # and the parent has the others here
        child = os.fork()
        if child == 0:
            # A call that waits for the thread, which is not here, would never return.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)
            answer = 1
            try:
                with pytest.raises(AlreadyClosed, match="after the fork"):
                    producer.send(b"0")
                for receive in (
                    consumer.receive, consumer.receive_batch, lambda: next(consumer.batches()),
                    lambda: next(iter(consumer)), lambda: next(iterator),
                ):  # fmt: skip
                    with pytest.raises(AlreadyClosed, match="after the fork"):
                        receive()
                producer.close()
                client.close()
                answer = 0
            finally:
                os._exit(answer)
        assert os.waitpid(child, 0)[1] == 0
        assert consumer.receive(5.0).value == b"1"
        producer.send(b"1")


def test_a_closed_client_leaves_no_thread_when_connecting_fails() -> None:
    before = threading.active_count()
    with pytest.raises(MagnetarError, match="cannot connect"):
        connect("magnetar://127.0.0.1:1")
    assert threading.active_count() == before


def test_an_error_in_the_body_leaves_at_once(url: str) -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), connect(url) as client, client.create_producer("t") as producer:  # noqa: PT012
        producer.send_nowait(b"0")
        raise KeyError
    assert threading.active_count() == before


@pytest.mark.parametrize("way", ["iteration", "batches", "receive"])
def test_a_signal_handler_stops_a_loop_behind_what_is_in_hand(url: str, way: str) -> None:
    """While it waits for a message, as well: `stop` waits for nobody."""
    with connect(url) as client:
        with client.create_producer("t") as producer:
            producer.send_many([b"0", b"1"])
        consumer = client.subscribe("t", "s", start="earliest", ack_group_delay=30.0)
        before = signal.signal(signal.SIGUSR1, lambda *_: consumer.stop())
        # By another thread, as when the process was suspended: nothing interrupts this one then.
        timer = threading.Timer(0.05, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
        taken: list[Any] = []

        def deal_with(*messages: Any) -> None:
            taken.extend(messages)
            consumer.ack(messages)
            if len(taken) == 2:
                timer.start()  # it waits for more by then, most likely

        try:
            if way == "iteration":
                for message in consumer:
                    deal_with(message)
            elif way == "batches":
                for batch in consumer.batches():
                    deal_with(*batch)
            else:
                with contextlib.suppress(AlreadyClosed):
                    while True:
                        deal_with(consumer.receive())
        finally:
            timer.join()
            signal.signal(signal.SIGUSR1, before)
        assert [message.value for message in taken] == [b"0", b"1"]
        consumer.close()
        consumer.stop()
        with client.subscribe("t", "s") as again, pytest.raises(ReceiveTimeout):
            again.receive(timeout=0.1)
    assert client.connection_state == "closed"
    consumer.stop()
