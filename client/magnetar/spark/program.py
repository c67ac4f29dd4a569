"""One job as a program of its own, with a Spark session: what `magnetar spark JOB` runs.

    python -m magnetar.spark.program

    standard input    an Order, one line of JSON; its end ends the program, and with that the Java machine below it
    standard output   a line of JSON behind MARK is a message: {"state": what it does now}, and in the end either
                      {"report": a Report} or {"error": one line, "log": whether Spark's log has more to say}
    standard error    Spark's log, which whatever else stands on standard output belongs to as well

The Java machine has the same standard output, so that ends when all have ended. A signal to the process group ends all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, TypedDict

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.sql import SparkSession

from magnetar.proto.errors import MagnetarError

from . import jobs
from .jobs.folders import check_new_folder

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

MARK: Final = "\x1emagnetar "
STARTING: Final = "starting Spark"
REFRESH_S: Final = 0.3
POLL_S: Final = 1
# An error of ours as the last line of a Python traceback, which Spark quotes in an error of its own.
_QUOTED = re.compile(r"(?:magnetar\.proto\.errors\.\w+|InvalidArgument): (.+)")

Say = Callable[[str], None]
# Title, columns, rows, and the numbers of columns that are aligned to the right.
Table = tuple[str, Sequence[str], Sequence[Sequence[str]], Sequence[int]]


class Order(TypedDict):
    """What is to be done. `options` are those of the command, by their names there."""

    job: str
    url: str
    options: dict[str, Any]
    settings: dict[str, str]  # of Spark, its master among them
    watched: bool  # whether anybody reads the states


@dataclass(slots=True)
class Report:
    """What became of a job: all of it for scripts in `result`; a title, figures, a table and notes for people."""

    result: dict[str, Any]
    title: str
    figures: dict[str, Any]
    table: Table | None = None
    notes: Sequence[str] = ()
    failed: bool = False  # it ran, and found what should not be


# --- the jobs --------------------------------------------------------------------------------------------------------


def arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a command as arguments of its job."""
    named = dict(options)
    if "topics" in named:
        named["topics"] = named["topics"] or []
    for option, argument in (("byte_keys", "text_keys"), ("without_key", "by_key")):
        if option in named:
            named[argument] = not named.pop(option)
    if "drop_keyless" in named:
        named["keyless"] = "drop" if named.pop("drop_keyless") else "keep"
    if "file_mb" in named:
        named["file_bytes"] = named.pop("file_mb") << 20
    return named


def check(job: str, url: str, options: Mapping[str, Any]) -> None:
    """Raises, without Spark, what the job would refuse."""
    named = arguments(options)
    if job == "audit":
        named.pop("rows")
        if path := named.pop("to_parquet"):
            check_new_folder("to_parquet", path)
    getattr(jobs, f"check_{job}")(url, **named)


def _archive(spark: SparkSession, url: str, named: dict[str, Any], _say: Say) -> Report:
    result = jobs.archive(spark, url, **named)
    trimmed = [{"topic": topic, "ledger": ledger} for topic, ledger in result.trimmed]
    figures: dict[str, Any] = {
        "ledgers archived": len(result.archived),
        "messages": result.rows,
        "bytes of Parquet": result.bytes,
        "archived before": result.archived_before,
    }
    seldom = (
        ("in another archive", result.elsewhere, result.elsewhere),
        ("ledgers trimmed", len(trimmed), named["trim"]),
        ("ledgers moved", result.moved, named["moved"]),
        ("kept as they are", sum(one.ledgers for one in result.kept), named["trim"] or result.kept),
        ("not in the topic any more", result.not_in_topic, result.not_in_topic),
    )
    figures |= {name: figure for name, figure, shown in seldom if shown}
    notes = [
        f"{one.topic}: {one.ledgers} ledgers stay as they are, from {one.first} on: {one.reason}"
        for one in result.kept
    ]
    title = f"archived {', '.join(named['topics'])} in {named['path']}"
    failed = any(one.damaged for one in result.kept)
    return Report({**asdict(result), "trimmed": trimmed}, title, figures, notes=notes, failed=failed)


def _audit(spark: SparkSession, url: str, named: dict[str, Any], _say: Say) -> Report:
    shown, to_parquet, topics = named["rows"], named["to_parquet"], named["topics"]
    result = jobs.audit(spark, url, topics, report=named["report"])
    if to_parquet:
        result.table.write.mode("errorifexists").parquet(to_parquet)
    rows = (
        [row.asDict() for row in result.problems.limit(shown).collect()] if shown and not result.clean else []
    )
    count = 0 if result.clean else result.problems.count()
    figures: dict[str, Any] = {"ledgers": result.ledgers}
    figures |= {f"copies {state}": copies for state, copies in result.states.items()}
    if result.queued is not None:
        figures |= {"queued for repair": result.queued, "queued before": result.known}
    if result.unreported:
        figures |= {"not queued for repair": result.unreported}
    of_result = ("clean", "ledgers", "states", "queued", "known", "unreported")
    summary = {name: getattr(result, name) for name in of_result} | {"differences": count, "rows": rows}
    more = [f"{count - len(rows):,} more; --to-parquet PATH writes all"] if 0 < len(rows) < count else []
    title = f"audited {', '.join(topics)}"
    return Report(summary, title, figures, differences(rows), more, not result.clean)


def differences(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Copies that are not ok, as a table."""
    cells = [
        (
            row["topic"],
            f"{row['ledger']}"
            if row["ledger"] == row["stored_ledger"]
            else f"{row['ledger']} ({row['stored_ledger']})",
            f"{row['first_entry']}-{row['last_entry']}",
            row["bookie"],
            row["state"],
            row["detail"],
        )
        for row in rows
    ]
    columns = ("topic", "ledger (stored)", "entries", "bookie", "verdict", "detail")
    return ("differences", columns, cells, (1, 2)) if cells else None


def _compact(spark: SparkSession, url: str, named: dict[str, Any], _say: Say) -> Report:
    result = jobs.compact(spark, url, **named)
    figures = {"messages read": result.messages_read, "messages kept": result.messages_kept}
    return Report(asdict(result), f"compacted {result.topic} into {result.target}", figures)


def _replay(spark: SparkSession, url: str, named: dict[str, Any], _say: Say) -> Report:
    result = jobs.replay(spark, url, **named)
    title = f"replayed {', '.join(result.sources)} into {result.target}"
    return Report(asdict(result), title, {"messages": result.messages})


def _rollup(spark: SparkSession, url: str, named: dict[str, Any], say: Say) -> Report:
    query = jobs.start_rollup(spark, url, **named)
    figures = StreamFigures()
    while not query.awaitTermination(POLL_S):
        figures.add(query)
        say(f"batch {figures.batches}, {figures.rows_read:,} messages")
    figures.add(query)
    topics, target = named["topics"], named["to_topic"] or named["to_parquet"]
    read, watermark = figures.rows_read, figures.watermark
    summary = {"topics": topics, "target": target, "batches": figures.batches, "messages_read": read}
    shown = {"batches": figures.batches, "messages read": read, "watermark": watermark or "none"}
    title = f"rolled up {', '.join(topics)} into {target}"
    return Report({**summary, "watermark": watermark}, title, shown)


@dataclass(slots=True)
class StreamFigures:
    """What the batches of a streaming query did."""

    batches: int = 0
    rows_read: int = 0
    watermark: str = ""
    _last_batch: int = -1

    def add(self, query: StreamingQuery) -> None:
        """Batches that have ended since it was looked at last."""
        for progress in query.recentProgress:
            if progress["batchId"] > self._last_batch:
                self._last_batch = progress["batchId"]
                self.batches += 1
                self.rows_read += progress["numInputRows"]
                self.watermark = progress.get("eventTime", {}).get("watermark", self.watermark)


# What each job does, in a word, and how it is run.
JOBS: Final[dict[str, tuple[str, Callable[[SparkSession, str, dict[str, Any], Say], Report]]]] = {
    "archive": ("archiving", _archive),
    "audit": ("auditing", _audit),
    "compact": ("compacting", _compact),
    "replay": ("replaying", _replay),
    "rollup": ("rolling up", _rollup),
}

# --- the program -----------------------------------------------------------------------------------------------------


def perform(spark: SparkSession, order: Order, say: Say) -> dict[str, Any]:
    """Runs the job of an order; its last message."""
    doing, work = JOBS[order["job"]]
    say(doing)
    try:
        with _tasks_counted(spark, doing, say) if order["watched"] else contextlib.nullcontext():
            return {"report": asdict(work(spark, order["url"], arguments(order["options"]), say))}
    except MagnetarError as error:
        return {"error": error.message, "log": False}
    except (PySparkException, Py4JError) as error:
        quoted = quoted_error(str(error))
        return {"error": quoted or f"Spark: {of_java(error)}", "log": not quoted}


@contextlib.contextmanager
def _tasks_counted(spark: SparkSession, doing: str, say: Say) -> Iterator[None]:
    """While the body runs a thread tells how many of the tasks that are known are done."""
    ended = threading.Event()
    tracker = spark.sparkContext.statusTracker()
    stages: dict[int, tuple[int, int]] = {}  # every one that was seen: Spark forgets those that are done

    def follow() -> None:
        while not ended.wait(REFRESH_S):
            with contextlib.suppress(Exception):  # Spark stops: the body tells why
                for job in tracker.getActiveJobsIds():
                    detail = tracker.getJobInfo(job)
                    for number in detail.stageIds if detail is not None else ():
                        stage = tracker.getStageInfo(number)
                        if stage is not None:
                            stages[number] = (stage.numCompletedTasks, stage.numTasks)
            if stages:
                done, tasks = (sum(column) for column in zip(*stages.values(), strict=True))
                say(f"{doing}: {done}/{tasks} tasks")

    threading.Thread(target=follow, name="progress", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def quoted_error(text: str) -> str:
    """What Magnetar said in an error of Spark; "" if it did not."""
    quoted = _QUOTED.findall(text)
    return str(quoted[-1]).strip() if quoted else ""


def of_java(error: object) -> str:
    """The line of an error of Spark that says what is wrong: of a Python traceback in it the last line, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    _, _, within = str(error).partition("Traceback (most recent call last):\n")
    ends = [line for line in within.splitlines() if line and not line[0].isspace()]
    if ends:
        return ends[0]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):
        return lines[1].removeprefix(": ")
    return lines[0]


def _session(order: Order) -> SparkSession:
    builder = SparkSession.builder.appName("magnetar")
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    if order["settings"]["spark.master"].startswith("local"):
        # All in one process: neither the machine's name nor a firewall should matter.
        quiet |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        if order["job"] == "rollup":
            # Each partition is a task and a state store in every batch, and a checkpoint never changes their number.
            quiet["spark.sql.shuffle.partitions"] = str(max(2, os.cpu_count() or 2))
    for name, value in (quiet | order["settings"]).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _send(**message: Any) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(message, default=str)}\n")
    sys.stdout.flush()


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    """Entry point."""
    order: Order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, name="input", daemon=True).start()
    _send(state=STARTING)
    try:
        spark = _session(order)
    except PySparkRuntimeError:
        return  # no Java machine: what it said is in the log
    except Exception as error:
        _send(error=f"Spark does not start: {of_java(error)}", log=True)
        return
    _send(**perform(spark, order, lambda state: _send(state=state)))
    spark.stop()


if __name__ == "__main__":
    main()
