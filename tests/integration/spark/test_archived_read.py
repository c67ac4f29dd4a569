"""A topic whose beginning lives in files is read as before, row for row, in batches and as a stream."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from magnetar.archive.files import ArchiveFolder
from magnetar.proto.ids import MessageId
from magnetar.spark.jobs import archive, trim
from support.service import Service
from support.spark_kit import topic_frame
from support.spark_topics import Sent, Topics, full

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.real, pytest.mark.spark]


def messages(n: int) -> list[Sent]:
    """Text keys, byte keys and none; null values; properties and event times here and there."""
    return [
        Sent(
            None if i % 11 == 0 else b"v%d" % i,
            (None, f"k{i}-ü", b"\xff%d" % i)[i % 3],
            {"n": str(i)} if i % 4 == 0 else None,
            1_700_000_000_000 + i if i % 2 else None,
        )
        for i in range(n)
    ]


def told(frame: Any) -> list[tuple[Any, ...]]:
    """All columns, in the order of the topic."""
    rows = sorted(frame.collect(), key=lambda row: row.offset)
    return [
        tuple(bytes(one) if isinstance(one, bytearray) else one for one in row.asDict().values())
        for row in rows
    ]


def archived(topics: Topics, topic: str) -> int:
    return sum(len(row) > 10 for row in topics.ledgers(topic))


def test_archived_and_kept_rows_are_one_table(
    spark: Any, topics: Topics, read: Callable[..., Any], tmp_path: Path
) -> None:
    topics.produce("tiered", messages(60), per_entry=5)
    before_rows = topics.ledgers("tiered")
    before = told(read("tiered", lease_s="0.05"))
    assert len(before) == 60
    path = str(tmp_path / "archive ü %")
    result = archive(spark, topics.service.url, ["tiered"], path, file_bytes=200, trim=True)
    assert (result.kept, result.elsewhere) == ((), 0)
    gone = len([row for row in before_rows if row[8]])
    assert len(result.trimmed) == archived(topics, "tiered") == gone
    topics.produce("tiered", messages(12), per_entry=3)
    reads = topics.entries_read()
    frame = read("tiered", partition_bytes="200")
    assert frame.rdd.getNumPartitions() > 2 * gone
    after = told(frame)
    assert after[:60] == before
    assert len(after) == 72
    assert [row[5] for row in after] == list(range(72))
    # Nothing of the archived part is asked of bookies.
    kept = [row for row in topics.ledgers("tiered") if len(row) == 10]
    assert topics.entries_read() - reads <= sum(row[3] for row in kept)

    # Places within the archived part, over the border, and behind it.
    border = kept[0][2]
    ids = {row[5]: str(MessageId.from_bytes(row[4])) for row in after}
    for low, high in ((0, 9), (5, border), (border - 3, border + 2), (border, 72), (17, 18)):
        places = {"start": ids[low]} | ({"end": ids[high]} if high < 72 else {})
        assert told(read("tiered", **places)) == after[low:high]
    time = after[30][8]
    assert told(read("tiered", start=time.astimezone().isoformat())) == [
        row for row in after if row[8] >= time
    ]
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        filtered = read("tiered").where("offset >= 30 AND offset < 33")
        assert told(filtered) == after[30:33]
        assert filtered.rdd.getNumPartitions() <= 2
        assert (
            told(read("tiered").where(f"offset >= {border - 1} AND offset < {border + 1}"))
            == after[border - 1 : border + 1]
        )
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")

    # As plain Parquet, and as a stream from the start over the border, bounded by rows.
    assert spark.read.parquet(path).count() == border
    folder = ArchiveFolder(path)
    (manifest, *_) = folder.manifests(full("tiered")).values()
    whole = read("tiered")

    # Files that are gone, and that are not as they were.
    file = Path(folder.data_path(full("tiered"), manifest.ledger, manifest.files[0].name))
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(Exception, match=r"20 messages of .*archived at file:///.*cannot be used: it has"):
        whole.collect()
    file.unlink()
    with pytest.raises(Exception, match=r"cannot be used: it is not there; bring it back, or read"):
        whole.collect()
    assert len(told(read("tiered", start=f"{manifest.ledger + 1}:0:0"))) == 72 - manifest.rows
    file.write_bytes(data)
    assert told(whole) == after


def test_a_stream_goes_over_the_border(
    spark: Any, topics: Topics, stream: Callable[..., Any], tmp_path: Path
) -> None:
    topics.produce("tiered-stream", messages(36), per_entry=3)
    path = str(tmp_path / "archive")
    assert archive(spark, topics.service.url, ["tiered-stream"], path, trim=True).kept == ()
    topics.produce("tiered-stream", messages(10), per_entry=5)
    seen: list[int] = []

    def take(frame: Any, batch: int) -> None:
        seen.extend(sorted(row.offset for row in frame.select("offset").collect()))

    def run() -> None:
        frame = stream("tiered-stream", max_rows_per_batch="13")
        query = (
            frame.writeStream.foreachBatch(take)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)

    run()
    assert seen == list(range(46))
    topics.produce("tiered-stream", messages(4), per_entry=2)
    run()
    assert seen == list(range(50))


def test_a_service_that_is_killed_while_it_lets_go_of_ledgers(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("broker.max_ledger_entries=2", "broker.min_ledger_age_ms=0", "broker.max_lease_ms=200")
    service = Service(tmp_path / "data", arguments=[word for one in settings for word in ("--set", one)])
    service.start()
    try:
        topics = Topics(service)
        topics.produce("killed", messages(40), per_entry=4)
        before = topics.rows("killed", 40)
        path = str(tmp_path / "archive")
        real = trim.Trimming._ask

        def asking(*arguments: Any, dry: bool) -> Any:
            if dry:
                return real(*arguments, dry=True)
            with ThreadPoolExecutor(1) as threads:
                asked = threads.submit(real, *arguments, dry=False)
                service.kill()
                service.start()
                return asked.result()

        with monkeypatch.context() as patched:
            patched.setattr(trim.Trimming, "_ask", asking)
            run(spark, service.url, path)
        counts = [row[4] for row in topics.ledgers("killed")]
        assert sum(counts) == 40, "each ledger is archived or at the bookies"
        topics.wait_for(lambda: run(spark, service.url, path).kept == (), "the rest is let go of")
        assert archived(topics, "killed") == len([count for count in counts if count])
        frame = topic_frame(spark, service.url, "killed")
        found = sorted(frame.collect(), key=lambda row: row.offset)
        assert [(bytes(row.message_id), row.value and bytes(row.value)) for row in found] == [
            (row.message_id, row.value) for row in before
        ]
        service.stop()
    finally:
        service.kill()


def run(spark: Any, url: str, path: str) -> Any:
    return archive(spark, url, ["killed"], path, trim=True)
