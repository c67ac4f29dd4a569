"""`archive` is what the topic has, once, however often it was interrupted; `replay` brings it back."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magnetar.archive.files import ArchiveFolder
from magnetar.proto.errors import InvalidArgument
from magnetar.spark.jobs import archive, read_archive, replay
from support.archive_kit import damaged
from support.spark_kit import topic_frame

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.real, pytest.mark.spark]

FULL = "persistent://public/default/"


def messages(n: int, name: str) -> list[tuple[Any, ...]]:
    return [
        (
            f"k{i % 7}-ü" if i % 5 else None,
            None if i % 11 == 0 else f"{name}-{i}".encode(),
            {"properties": {"n": str(i)} if i % 2 else None, "event_time": 1_700_000_000_000 + i},
        )
        for i in range(n)
    ]


def comparable(rows: list[Any]) -> list[tuple[Any, ...]]:
    return sorted(
        [
            tuple(bytes(value) if isinstance(value, bytearray) else value for value in row.asDict().values())
            for row in rows
        ],
        key=lambda row: (row[2], row[5]),  # topic, offset
    )


def told(rows: list[Any]) -> list[tuple[Any, ...]]:
    """What a message keeps when it is replayed, in the order of offsets."""
    return [
        (row.key, row.value, row.properties, row.event_time)
        for row in sorted(rows, key=lambda row: row.offset)
    ]


def files_below(path: Path) -> dict[str, tuple[int, int]]:
    return {
        str(one.relative_to(path)): (one.stat().st_mtime_ns, one.stat().st_size)
        for one in path.rglob("*")
        if one.is_file() and not one.name.endswith(".crc")
    }


def test_closed_ledgers_once_and_back_again(
    spark: Any, url: str, produce: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce("archive-a", messages(450, "a"), flush_every=9)
    produce("archive-b", messages(250, "b"), flush_every=9)
    path = str(tmp_path / "archive")

    # A run that dies after its first round.
    rounds: list[str] = []
    module = importlib.import_module("magnetar.spark.jobs.archive")
    real = module._archive_round

    def dying(*arguments: Any) -> Any:
        if rounds:
            raise KeyboardInterrupt
        rounds.append("one")
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(module, "ROUND_LEDGERS", 1)
        patched.setattr(module, "_archive_round", dying)
        with pytest.raises(KeyboardInterrupt):
            archive(spark, url, ["archive-a", "archive-b"], path, file_bytes=1000)
    # What it left of the second ledger, and a file that no manifest names.
    folder = ArchiveFolder(path)
    (first,) = folder.manifests(FULL + "archive-a")
    before = files_below(tmp_path)
    stray = Path(folder.path_of(FULL + "archive-a", first + 1, "entries-00000000-00000001.parquet"))
    stray.parent.mkdir()
    stray.write_bytes(b"half")

    result = archive(spark, url, ["archive-a", "archive-b"], path)
    assert result.archived_before == 1
    assert first not in [one.ledger for one in result.archived if one.topic == FULL + "archive-a"]
    after = files_below(tmp_path)
    assert {name: after[name] for name in before} == before
    manifests = [one for topic in folder.topics() for one in folder.manifests(topic).values()]
    assert all(damaged(folder, one) == [] for one in manifests)
    first_manifest = folder.manifests(FULL + "archive-a")[first]
    assert len(first_manifest.files) > 1  # of the run with small files
    assert json.loads(first_manifest.to_json())["format"] == 1

    rows, topics = read_archive(spark, path)
    assert topics == (FULL + "archive-a", FULL + "archive-b")
    archived = rows.collect()
    ends = {topic: max(one.end_offset for one in folder.manifests(topic).values()) for topic in topics}
    source = [
        row
        for name in ("archive-a", "archive-b")
        for row in topic_frame(spark, url, name).collect()
        if row.offset < ends[row.topic]
    ]
    assert comparable(archived) == comparable(source)
    assert ends[FULL + "archive-a"] > 200

    again = archive(spark, url, ["archive-a", "archive-b"], path)
    assert (again.archived, again.archived_before) == ((), len(manifests))
    assert files_below(tmp_path) == after

    # --- and back ---
    all_of_it = replay(spark, url, to_topic="again", archive=path)
    assert all_of_it.messages == len(archived)
    written = sorted(topic_frame(spark, url, "again").collect(), key=lambda row: row.offset)
    expected = [told([row for row in archived if row.topic == topic]) for topic in topics]
    assert told(written) == expected[0] + expected[1]
    part = replay(
        spark, url, to_topic="part", archive=path, topics=["archive-a"], from_offset=17, before_offset=101
    )
    assert part.messages == 84
    assert told(topic_frame(spark, url, "part").collect()) == expected[0][17:101]


def test_replay_of_a_range_of_topics(spark: Any, url: str, produce: Callable[..., None]) -> None:
    produce("replay-a", messages(450, "a"), flush_every=9)
    produce("replay-b", messages(100, "b"), flush_every=9)
    by_offset = replay(
        spark, url, to_topic="by-offset", topics=["replay-a", "replay-b"], from_offset=50, before_offset=95
    )
    a, b = (topic_frame(spark, url, name).collect() for name in ("replay-a", "replay-b"))
    assert by_offset.messages == 90
    assert told(topic_frame(spark, url, "by-offset").collect()) == told(a)[50:95] + told(b)[50:95]
    # A time range begins and ends where the broker's clock passed; the last entry was stored after the first.
    times = sorted({row.append_time.astimezone() for row in a})
    middle = times[len(times) // 2]
    result = replay(spark, url, to_topic="by-time", topics=["replay-a"], start=middle.isoformat())
    wanted = [row for row in a if row.append_time.astimezone() >= middle]
    assert 0 < result.messages == len(wanted) < len(a)
    assert told(topic_frame(spark, url, "by-time").collect()) == told(wanted)


def test_what_cannot_be_replayed(spark: Any, url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="say what to replay"):
        replay(spark, url, to_topic="x")
    with pytest.raises(InvalidArgument, match="there is no archive at"):
        replay(spark, url, to_topic="x", archive=str(tmp_path / "nothing"))
    with pytest.raises(InvalidArgument, match="are no range"):
        replay(spark, url, to_topic="x", topics=["y"], from_offset=9, before_offset=3)
