"""`readStream`: micro-batches from a real service; what the checkpoint and the subscription promise."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magnetar.proto.errors import MessageLost
from magnetar.proto.ids import MessageId
from magnetar.spark.options import ReadOptions
from magnetar.spark.schema import COLUMNS
from magnetar.spark.stream_source import TopicStreamReader
from magnetar.spark.versions import ReadAllAvailable
from support.service import Service
from support.spark_kit import old_spark
from support.spark_topics import Topics, full

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180, func_only=True), pytest.mark.real]

Stream = Callable[..., Any]


needs_bounded_batches = pytest.mark.skipif(
    old_spark(4, 2), reason="before 4.2 Spark makes one batch of what is there"
)


class Copy:
    """A query that copies topics into a topic, and its checkpoint; `run` goes on until all that is there is copied."""

    def __init__(self, stream: Stream, service: Service, topics: Topics, room: Path, target: str) -> None:
        self._stream = stream
        self._service = service
        self._room = room
        self._target = target
        topics.create(target)

    def run(self, topic: str = "", **options: str) -> list[int]:
        """Returns the rows of each micro-batch."""
        rows = self._stream(topic, "key binary, value binary", **options)
        query = (
            rows.writeStream.format("magnetar")
            .option("service_url", self._service.url)
            .option("topic", self._target)
            .option("checkpointLocation", str(self._room))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [one["numInputRows"] for one in query.recentProgress]

    def forget_commit(self) -> None:
        """As if the driver had been killed after the sink's commit and before Spark's own log of it."""
        last = max(int(one.name) for one in (self._room / "commits").iterdir() if one.name.isdigit())
        for name in (str(last), f".{last}.crc"):
            (self._room / "commits" / name).unlink(missing_ok=True)

    @property
    def offset(self) -> dict[str, Any]:
        """What the checkpoint says of the source's last batch."""
        last = max(int(one.name) for one in (self._room / "offsets").iterdir() if one.name.isdigit())
        return dict(json.loads((self._room / "offsets" / str(last)).read_text().splitlines()[-1]))


@pytest.fixture
def copy(stream: Stream, service: Service, topics: Topics, tmp_path: Path) -> Callable[[str], Copy]:
    return lambda target: Copy(stream, service, topics, tmp_path / "checkpoint", target)


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % n for n in range(first, end)]


def mark(topics: Topics, topic: str, subscription: str) -> MessageId:
    """Mark-delete position of a subscription."""
    return MessageId(*topics.stats(topic)["subscriptions"][subscription]["mark_delete"])


@needs_bounded_batches
def test_admission_control_is_exact_and_the_subscription_moves_in_commit_alone(
    topics: Topics, copy: Callable[[str], Copy]
) -> None:
    topics.produce("admitted", numbers(0, 100), per_entry=7)
    query = copy("admitted-copy")
    assert query.run("admitted", max_rows_per_batch="30", subscription="mine") == [30, 30, 30, 10]
    assert topics.values("admitted-copy") == numbers(0, 100)
    # Spark commits a batch when it plans the next one: what was committed is never past what the checkpoint has done.
    done = MessageId.parse(query.offset["topics"][full("admitted")]["id"])
    assert query.offset["subscription"] == "mine"
    assert MessageId(0, 0, 0) < mark(topics, "admitted", "mine") <= done
    assert topics.stats("admitted")["leases"] <= 3, "a query has one lease, not one for each batch"
    topics.produce("admitted", numbers(100, 120), per_entry=7)
    assert query.run("admitted", max_rows_per_batch="30", subscription="mine") == [20]
    assert topics.values("admitted-copy") == numbers(0, 120)


@needs_bounded_batches
def test_a_kill_between_attach_and_the_commit_log_leaves_one_copy(
    topics: Topics, copy: Callable[[str], Copy]
) -> None:
    topics.produce("logged", numbers(0, 60), per_entry=7)
    query = copy("logged-copy")
    assert sum(query.run("logged", max_rows_per_batch="40")) == 60
    for _ in range(2):
        query.forget_commit()
        topics.produce("logged", numbers(60, 61))
        query.run("logged", max_rows_per_batch="40")
        query.forget_commit()
        query.run("logged", max_rows_per_batch="40")
    assert topics.values("logged-copy") == [*numbers(0, 60), b"60", b"60"]
    assert topics.staged("logged-copy") == 0


@pytest.mark.spark
def test_new_topics_of_a_pattern_are_picked_up_from_their_start(
    topics: Topics, copy: Callable[[str], Copy]
) -> None:
    topics.produce("fresh-a", [b"a%d" % n for n in range(10)], per_entry=3)
    query = copy("copied")
    query.run(topics_pattern="fresh-.*")
    topics.produce("fresh-b", [b"b%d" % n for n in range(10)], per_entry=3)
    topics.produce("fresh-a", [b"a%d" % n for n in range(10, 12)])
    query.run(topics_pattern="fresh-.*", max_rows_per_batch="5")
    query.run(topics_pattern="fresh-.*")
    values = [value or b"" for value in topics.values("copied")]
    assert [v for v in values if v.startswith(b"a")] == [b"a%d" % n for n in range(12)]
    assert [v for v in values if v.startswith(b"b")] == [b"b%d" % n for n in range(10)]
    assert set(query.offset["topics"]) == {full("fresh-a"), full("fresh-b")}


def test_data_that_was_trimmed_fails_the_query_unless_an_option_says_otherwise(
    topics: Topics, copy: Callable[[str], Copy]
) -> None:
    topics.produce("gone", numbers(0, 20), per_entry=2)
    query = copy("gone-copy")
    query.run("gone", subscription="gone-cursor")
    topics.produce("gone", numbers(20, 60), per_entry=2)
    topics.ask(lambda client: client.admin.delete_subscription("gone", "gone-cursor", force=True))
    topics.consume_all("gone")
    # The query's lease is over before it goes on, as if it had been away for long.
    topics.wait_trimmed("gone")
    first = topics.ledgers("gone")[0][2]
    with pytest.raises(
        Exception, match=rf"MessageLost: \d+ messages of {full('gone')} from .* on were trimmed before the query read "
        "them; with the option fail_on_data_loss=false"
    ):  # fmt: skip
        query.run("gone")
    query.run("gone", fail_on_data_loss="false")
    assert topics.values("gone-copy") == numbers(0, 20) + numbers(max(20, first), 60)


@pytest.mark.spark
def test_a_checkpoint_of_another_source_is_one_clear_error(
    topics: Topics, copy: Callable[[str], Copy], tmp_path: Path
) -> None:
    topics.produce("checked", numbers(0, 5))
    query = copy("checked-copy")
    query.run("checked")
    offsets = tmp_path / "checkpoint" / "offsets" / "0"
    lines = offsets.read_text().splitlines()
    offsets.write_text("\n".join([*lines[:-1], '{"orders": {"0": 12}}']))
    (offsets.parent / ".0.crc").unlink()
    shutil.rmtree(tmp_path / "checkpoint" / "commits")
    (tmp_path / "checkpoint" / "commits").mkdir()
    with pytest.raises(
        Exception, match="InvalidArgument: the checkpoint has an offset that is not of a topic"
    ):
        query.run("checked")


def test_where_a_query_begins_is_asked_twice_and_answered_alike(topics: Topics, service: Service) -> None:
    topics.produce("begun", numbers(0, 10))
    options = ReadOptions.parse({"service_url": service.url, "topic": "begun", "start": "latest"})
    reader = TopicStreamReader(options, tuple(COLUMNS))
    begin = reader.initialOffset()
    topics.produce("begun", numbers(10, 20))
    assert reader.initialOffset() == begin
    assert begin["topics"][full("begun")]["offset"] == 10
    stats = topics.stats("begun")
    assert (list(stats["subscriptions"]), stats["leases"]) == ([], 1), (
        "what is behind the query stays as it was"
    )


@pytest.mark.spark
def test_a_topic_that_was_deleted_and_made_again_is_not_taken_for_the_old_one(
    topics: Topics, copy: Callable[[str], Copy]
) -> None:
    """As many messages and ledgers as before: offsets alone say that nothing came."""
    topics.produce("remade", numbers(0, 50), per_entry=7)
    query = copy("remade-copy")
    query.run("remade")
    topics.ask(lambda client: client.admin.delete_topic("remade"))
    topics.produce("remade", numbers(50, 100), per_entry=7)
    with pytest.raises(
        Exception,
        match=f"MessageLost: topic {full('remade')} was deleted and made again: (what|a batch of what) it had",
    ):
        query.run("remade")
    query.run("remade", fail_on_data_loss="false")
    assert topics.values("remade-copy") == numbers(0, 100)
    topics.produce("remade", numbers(100, 103))
    query.run("remade")
    assert topics.values("remade-copy") == numbers(0, 103)


def test_a_query_holds_what_it_needs_by_a_lease_that_goes_on_while_it_waits(
    topics: Topics, service: Service
) -> None:
    """No subscription is made, so a topic without any goes on keeping all; and where others trim, it is held back."""
    topics.produce("held-back", numbers(0, 40), per_entry=2)
    options = ReadOptions.parse(
        {"service_url": service.url, "topic": "held-back", "max_rows_per_batch": "10", "lease_s": "3"}
    )
    reader = TopicStreamReader(options, ("value",))
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, reader.getDefaultReadLimit())
    reader.commit(end)
    topics.consume_all("held-back")
    ledgers = topics.ledgers("held-back")
    # Longer than the lease, without a trigger.
    over = time.monotonic() + 4.5
    topics.wait_for(lambda: time.monotonic() > over, "the lease of the start is over")
    assert topics.ledgers("held-back") == ledgers
    assert list(topics.stats("held-back")["subscriptions"]) == ["everything"]
    last = reader.latestOffset(end, ReadAllAvailable())
    assert [b.num_rows for p in reader.partitions(end, last) for b in reader.read(p)] != []
    assert reader.reportLatestOffset() == {**last, "begins": {}}
    reader.stop()
    topics.wait_trimmed("held-back")
    with pytest.raises(
        MessageLost, match=r"30 messages of .*held-back from .* on were trimmed before the query read them"
    ):
        reader.partitions(end, last)


def test_a_topic_that_a_pattern_finds_has_its_place_from_then_on(topics: Topics, service: Service) -> None:
    """It may be trimmed before its first batch is planned, or while the batch is asked for again."""
    topics.produce("seen-a", numbers(0, 4), per_entry=2)
    options = ReadOptions.parse({"service_url": service.url, "topics_pattern": "seen-.*", "lease_s": "0.2"})
    reader = TopicStreamReader(options, ("value",))
    begin = reader.initialOffset()
    topics.produce("seen-b", numbers(0, 40), per_entry=2)
    end = reader.latestOffset(begin, ReadAllAvailable())
    reader.stop()
    assert set(end["begins"]) == {full("seen-b")}
    topics.consume_all("seen-b")
    topics.wait_trimmed("seen-b")
    with pytest.raises(MessageLost, match=r"messages of .*seen-b from .* on were trimmed"):
        reader.partitions(begin, end)
