"""`magnetar spark JOB` at work: a Spark session, the job, its result on standard output, one line when it fails.

Exit codes are those of `session`: 0 done, 1 it failed (or an audit found something), 2 the command line, 130 Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from magnetar.proto.errors import MagnetarError

from .session import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, fail, print_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REQUIRED = ("pyspark", "pyarrow")
PROBLEMS_SHOWN = 20
# An error of ours as the last line of a Python traceback, which Spark quotes in an error of its own.
_QUOTED = re.compile(r"(?:magnetar\.proto\.errors\.\w+|InvalidArgument): (.+)")


def require_spark() -> None:
    """Ends the command with one line when the `spark` extra is not installed."""
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        fail(
            "jobs of the data pipeline need Spark: pip install 'magnetar[spark]'  "
            f"(missing: {', '.join(missing)})"
        )


def settings_of(conf: Sequence[str] | None) -> dict[str, str]:
    """From `--conf name=value`."""
    found: dict[str, str] = {}
    for told in conf or ():
        name, equals, value = told.partition("=")
        if not equals or not name:
            fail(f"--conf is {told!r}; want NAME=VALUE, as spark.executor.memory=4g", EXIT_USAGE)
        found[name] = value
    return found


@contextmanager
def session(master: str, conf: Sequence[str] | None) -> Iterator[SparkSession]:
    """A session that ends with the command. Errors of the body become one line and an exit code."""
    require_spark()
    settings = settings_of(conf)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("magnetar").master(master)
    for name, value in ({"spark.ui.enabled": "false"} | settings).items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except Exception as error:
        # No Java, for one; what it says is many lines, and the first tells what is wrong.
        fail(f"Spark does not start ({first_line(error)}); it needs Java 17 or newer")
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
        sys.stdout.flush()
    except MagnetarError as error:
        fail(error.message)
    except PySparkException as error:
        fail(told_by_spark(str(error)))
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    finally:
        spark.stop()


def told_by_spark(text: str) -> str:
    """One line of an error of Spark: what Magnetar said, if it was that, else Spark's first line."""
    quoted = _QUOTED.findall(text)
    return str(quoted[-1]).strip() if quoted else f"Spark: {first_line(text)}"


def first_line(error: object) -> str:
    """Of what it says that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def archive(
    spark: SparkSession,
    url: str,
    topics: Sequence[str],
    path: str,
    *,
    file_mb: int,
    trim: bool,
    as_json: bool,
) -> None:
    """Runs the job and says what it archived."""
    from magnetar.spark import jobs

    result = jobs.archive(spark, url, topics, path, file_bytes=file_mb << 20, trim=trim)
    if as_json:
        manifests = [asdict(manifest) for manifest in result.archived]
        print_json({"archived": manifests, "passed_over": result.passed_over})
        return
    print(
        f"archived {len(result.archived)} ledgers: {result.rows} messages, {result.bytes} bytes of Parquet; "
        f"{result.passed_over} were in the archive before"
    )


def audit(spark: SparkSession, url: str, topics: Sequence[str], *, to_parquet: str, as_json: bool) -> None:
    """Runs the job, shows the first problems, and ends with 1 if there is one."""
    from magnetar.spark import jobs

    result = jobs.audit(spark, url, topics)
    if to_parquet:
        result.copies.write.mode("errorifexists").parquet(to_parquet)
    order = ("topic", "ledger", "entry", "bookie")
    problems = [row.asDict() for row in result.problems.orderBy(*order).limit(PROBLEMS_SHOWN).collect()]
    if as_json:
        print_json(
            {"clean": result.clean, "ledgers": result.ledgers, "states": result.states, "problems": problems}
        )
    else:
        told = ", ".join(f"{count} {state}" for state, count in result.states.items()) or "none"
        print(f"audited {result.ledgers} closed ledgers; copies of entries: {told}")
        for row in problems:
            detail = f": {row['detail']}" if row["detail"] else ""
            print(
                f"  {row['topic']} ledger {row['ledger']} (stored {row['stored_ledger']}) entry {row['entry']} "
                f"at {row['bookie']} {row['state']}{detail}"
            )
    if not result.clean:
        sys.stdout.flush()
        raise SystemExit(EXIT_FAILED)


def compact(spark: SparkSession, url: str, topic: str, *, as_json: bool, **named: Any) -> None:
    """Runs the job and says how much is left."""
    from magnetar.spark import jobs

    result = jobs.compact(spark, url, topic, **named)
    if as_json:
        print_json(asdict(result))
    else:
        print(
            f"compacted {result.messages_read} messages of {result.topic} to {result.messages_kept} in {result.target}"
        )


def replay(spark: SparkSession, url: str, *, as_json: bool, **named: Any) -> None:
    """Runs the job and says how much was replayed."""
    from magnetar.spark import jobs

    result = jobs.replay(spark, url, **named)
    if as_json:
        print_json(asdict(result))
    else:
        print(f"replayed {result.messages} messages of {', '.join(result.sources)} into {result.target}")


def rollup(spark: SparkSession, url: str, topics: Sequence[str], **named: Any) -> None:
    """Runs the query until it ends or somebody ends it."""
    from magnetar.spark import jobs

    query = jobs.start_rollup(spark, url, topics, **named)
    try:
        query.awaitTermination()
    finally:
        query.stop()


__all__ = ["archive", "audit", "compact", "replay", "require_spark", "rollup", "session", "told_by_spark"]
