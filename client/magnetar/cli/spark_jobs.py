"""`magnetar spark JOB` at work: arguments checked, a Spark session, the job, its result, one line when it fails.

Whatever can be known without Spark is checked before it starts, within a second: it takes ten times as long to start.
Exit codes are those of `session`: 0 done, 1 it failed (or an audit found something), 2 the command line, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from magnetar.proto.errors import InvalidArgument, InvalidTopicName, MagnetarError

from .session import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, fail, named_values, print_json
from .spark_progress import SparkWatch
from .spark_session import (
    SparkLog,
    interrupts,
    of_java,
    require_java,
    require_spark,
    spark_session,
)
from .tables import print_table, text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

T = TypeVar("T")
POLL_S: Final = 1
# An error of ours as the last line of a Python traceback, which Spark quotes in an error of its own.
_QUOTED = re.compile(r"(?:magnetar\.proto\.errors\.\w+|InvalidArgument): (.+)")
# How arguments of the functions, which their errors name, are called here.
FLAGS: Final = {
    "service_url": "--url",
    "to_topic": "--to-topic",
    "to_parquet": "--to-parquet",
    "from_offset": "--from-offset",
    "before_offset": "--before-offset",
    "start": "--start",
    "end": "--end",
    "window": "--window",
    "watermark": "--watermark",
    "checkpoint": "--checkpoint",
    "compression": "--compression",
    "path": "--path",
    "archive": "--archive",
    "with_backlog": "--with-backlog",
}
_NAMED = re.compile(r"\boption (start|end|compression|topics?)\b|"
                    r"^(window|watermark|checkpoint|path|archive|with_backlog)\b|"
                    r"\b(?:option )?(service_url|to_topic|to_parquet|from_offset|before_offset)\b")  # fmt: skip


@dataclass(slots=True)
class SparkRun:
    """One command: where Spark runs, how the result is printed, when it began.

    Ctrl-C in the body of `with`: exit code 130.
    """

    master: str
    conf: Sequence[str]
    as_json: bool = False
    began: float = field(default_factory=time.perf_counter)

    def __enter__(self) -> SparkRun:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            raise SystemExit(EXIT_INTERRUPTED) from None
        if isinstance(
            error, BrokenPipeError
        ):  # who reads the result has enough; Python would complain again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(EXIT_FAILED) from None

    @property
    def seconds(self) -> float:
        """Since the command began, to a tenth."""
        return round(time.perf_counter() - self.began, 1)

    def run(
        self,
        what: str,
        check: Callable[[], object],
        work: Callable[[SparkSession, SparkWatch], T],
        defaults: Mapping[str, str] | None = None,
    ) -> T:
        """`work` in a session, if `check` finds nothing wrong. Every error ends the command with one line.

        `defaults`: settings of Spark, unless `conf` names them.
        """
        settings = {**(defaults or {}), **named_values("--conf", self.conf, "spark.executor.memory=4g")}
        log = SparkLog()
        watch = SparkWatch()
        try:
            with interrupts() as signals, watch.shown():
                watch.say("asking the service")
                with options_as_flags():
                    check()
                require_java()
                watch.say("starting Spark")
                with (
                    spark_session(self.master, settings, log, signals) as spark,
                    watch.following(spark),
                ):
                    watch.say(what)
                    return _work(spark, watch, work, log)
        finally:
            log.close()

    def report(self, result: dict[str, Any], title: str, figures: dict[str, Any]) -> None:
        """The result on standard output: all of it as JSON, or the figures as a table."""
        if self.as_json:
            print_json({**result, "seconds": self.seconds})
            return
        print(title)
        rows = [(name, text(value)) for name, value in {**figures, "seconds": self.seconds}.items()]
        print_table("", ("", ""), rows, right=(1,))
        sys.stdout.flush()


def _work(
    spark: SparkSession, watch: SparkWatch, work: Callable[[SparkSession, SparkWatch], T], log: SparkLog
) -> T:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        return work(spark, watch)
    except MagnetarError as error:
        fail(as_flags(error.message))
    except (PySparkException, Py4JError) as error:
        text = str(error)  # read from the JVM now, which is about to end
        quoted = quoted_error(text)
        fail(as_flags(quoted) if quoted else f"Spark: {of_java(text)} {log.keep()}")


@contextlib.contextmanager
def options_as_flags() -> Iterator[None]:
    """An error becomes one line that names the option of the command: 2 for a wrong one, 1 for the service."""
    try:
        yield
    except MagnetarError as error:
        usage = isinstance(error, InvalidArgument | InvalidTopicName)
        fail(as_flags(error.message), EXIT_USAGE if usage else EXIT_FAILED)
    except OSError as error:
        fail(f"{error.filename or 'a file'}: {error.strerror or error}")


def as_flags(message: str) -> str:
    """Arguments that it names as options of the command."""

    def flag(match: re.Match[str]) -> str:
        name = next(group for group in match.groups() if group)
        return "TOPIC" if name.startswith("topic") else FLAGS[name]

    return _NAMED.sub(flag, message)


def quoted_error(text: str) -> str:
    """What Magnetar said in an error of Spark; "" if it did not."""
    quoted = _QUOTED.findall(text)
    return str(quoted[-1]).strip() if quoted else ""


def archive(
    run: SparkRun, url: str, topics: Sequence[str], path: str, *, file_mb: int, trim: bool, **named: bool
) -> None:
    """Runs the job and says what it archived. `named`: moved, with_backlog."""
    require_spark()
    from magnetar.spark import jobs

    arguments: dict[str, Any] = {"file_bytes": file_mb << 20, "trim": trim, **named}
    result = run.run(
        f"archiving {', '.join(topics)}",
        lambda: jobs.check_archive(url, topics, path, **arguments),
        lambda spark, _watch: jobs.archive(spark, url, topics, path, **arguments),
    )
    trimmed = [{"topic": topic, "ledger": ledger} for topic, ledger in result.trimmed]
    figures: dict[str, Any] = {
        "ledgers archived": len(result.archived),
        "messages": result.rows,
        "bytes of Parquet": result.bytes,
        "archived before": result.passed_over,
    }
    if result.elsewhere:
        figures["in another archive"] = result.elsewhere
    if trim:
        figures["ledgers trimmed"] = len(trimmed)
    if named.get("moved"):
        figures["ledgers moved"] = result.moved
    if trim or result.kept:
        figures["kept as they are"] = sum(one.ledgers for one in result.kept)
    if result.gone:
        figures["not in the topic any more"] = result.gone
    run.report(
        {
            "archived": [asdict(manifest) for manifest in result.archived],
            "passed_over": result.passed_over,
            "elsewhere": result.elsewhere,
            "trimmed": trimmed,
            "moved": result.moved,
            "gone": result.gone,
            "kept": [asdict(one) for one in result.kept],
        },
        f"archived {', '.join(topics)} in {path}",
        figures,
    )
    for one in result.kept:
        if not run.as_json:
            print(f"{one.topic}: {one.ledgers} ledgers stay as they are, from {one.first} on: {one.reason}")
    if any(one.damaged for one in result.kept):
        sys.stdout.flush()
        raise SystemExit(EXIT_FAILED)


def audit(
    run: SparkRun, url: str, topics: Sequence[str], *, to_parquet: str, report: bool, shown: int
) -> None:
    """Runs the job, shows the first differences, and ends with 1 if there is one."""
    require_spark()
    from magnetar.spark import jobs
    from magnetar.spark.jobs.folders import check_new_folder

    def check() -> None:
        if to_parquet:
            check_new_folder("to_parquet", to_parquet)
        jobs.check_audit(url, topics)

    def work(spark: SparkSession, _watch: SparkWatch) -> tuple[jobs.AuditResult, list[dict[str, Any]], int]:
        result = jobs.audit(spark, url, topics, report=report)
        if to_parquet:
            result.table.write.mode("errorifexists").parquet(to_parquet)
        if result.clean:
            return result, [], 0
        rows = result.problems.limit(shown).collect() if shown else []
        return result, [row.asDict() for row in rows], result.problems.count()

    result, problems, count = run.run(f"auditing {', '.join(topics)}", check, work)
    figures: dict[str, Any] = {"ledgers": result.ledgers}
    figures |= {f"copies {state}": copies for state, copies in result.states.items()}
    if result.queued is not None:
        figures |= {"queued for repair": result.queued, "queued before": result.known}
    if result.unreported:
        figures |= {"not queued for repair": result.unreported}
    summary = {
        "clean": result.clean,
        "ledgers": result.ledgers,
        "states": result.states,
        "queued": result.queued,
        "known": result.known,
        "unreported": result.unreported,
        "differences": count,
        "rows": problems,
    }
    run.report(summary, f"audited {', '.join(topics)}", figures)
    if problems and not run.as_json:
        _print_problems(problems, count)
    if not result.clean:
        sys.stdout.flush()
        raise SystemExit(EXIT_FAILED)


def _print_problems(problems: Sequence[dict[str, Any]], count: int) -> None:
    rows = [
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
        for row in problems
    ]
    print_table(
        "differences",
        ("topic", "ledger (stored)", "entries", "bookie", "verdict", "detail"),
        rows,
        right=(1, 2),
    )
    if count > len(rows):
        print(f"{count - len(rows):,} more; --to-parquet PATH writes all")


def compact(run: SparkRun, url: str, topic: str, **named: Any) -> None:
    """Runs the job and says how much is left."""
    require_spark()
    from magnetar.spark import jobs

    result = run.run(
        f"compacting {topic}",
        lambda: jobs.check_compact(url, topic, **named),
        lambda spark, _watch: jobs.compact(spark, url, topic, **named),
    )
    run.report(
        asdict(result),
        f"compacted {result.topic} into {result.target}",
        {"messages read": result.messages_read, "messages kept": result.messages_kept},
    )


def replay(run: SparkRun, url: str, **named: Any) -> None:
    """Runs the job and says how much was replayed."""
    require_spark()
    from magnetar.spark import jobs

    result = run.run(
        f"replaying into {named['to_topic']}",
        lambda: jobs.check_replay(url, **named),
        lambda spark, _watch: jobs.replay(spark, url, **named),
    )
    run.report(
        asdict(result),
        f"replayed {', '.join(result.sources)} into {result.target}",
        {"messages": result.messages},
    )


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


def rollup(run: SparkRun, url: str, topics: Sequence[str], **named: Any) -> None:
    """Runs the query until it ends or is stopped."""
    require_spark()
    from magnetar.spark import jobs

    figures = StreamFigures()

    def work(spark: SparkSession, watch: SparkWatch) -> None:
        query = jobs.start_rollup(spark, url, topics, **named)
        while not query.awaitTermination(POLL_S):
            figures.add(query)
            watch.figures(f"batch {figures.batches}, {figures.rows_read:,} messages")
        figures.add(query)

    # Each partition is a task and a state store in every batch, and a checkpoint never changes their number.
    partitions = {"spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2))}
    run.run(
        f"rolling up {', '.join(topics)}",
        lambda: jobs.check_rollup(url, topics, **named),
        work,
        partitions if run.master.startswith("local") else None,
    )
    target = named["to_topic"] or named["to_parquet"]
    run.report(
        {
            "topics": list(topics),
            "target": target,
            "batches": figures.batches,
            "messages_read": figures.rows_read,
            "watermark": figures.watermark,
        },
        f"rolled up {', '.join(topics)} into {target}",
        {
            "batches": figures.batches,
            "messages read": figures.rows_read,
            "watermark": figures.watermark or "none",
        },
    )


__all__ = [
    "SparkRun",
    "archive",
    "as_flags",
    "audit",
    "compact",
    "options_as_flags",
    "quoted_error",
    "replay",
    "rollup",
]
