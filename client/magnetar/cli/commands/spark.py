"""`magnetar spark JOB`: names, options and help of the pipeline's jobs. The work is in `spark_run` and `spark.program`.

Nothing here imports Spark: half a gigabyte that most installations do not have. Help texts break where their lines do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..terminal.options import DEFAULT_URL, Json, MessageCompression, Start, Topic, Url

spark_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Batch work on topics, on Spark: archive, audit, compact, replay, rollup.

    Spark runs on this machine, inside the command, unless --master names a
    cluster. It needs the extra (pip install 'magnetar\\[spark]') and Java 17 or
    newer. Arguments are checked before Spark starts, which takes some seconds.
    Tasks read and write the bookies themselves: these must be reachable from
    where the tasks run.

    Exit codes: 0 done, 1 the job failed or an audit found differences, 2 the
    command line is wrong, 130 Ctrl-C.""",
)

Topics = Annotated[list[str], typer.Argument(help="One or more topics.", metavar="TOPIC...")]
SomeTopics = Annotated[
    list[str] | None,
    typer.Argument(
        help="One or more topics; with --archive, all that it has by default.", metavar="TOPIC..."
    ),
]
Master = Annotated[
    str,
    typer.Option(
        "--master",
        envvar="SPARK_MASTER",
        help="Where Spark runs: local[N] is N cores of this machine; or spark://HOST:PORT, yarn, k8s://...",
        metavar="MASTER",
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option(
        "--conf",
        help="A setting of Spark, as spark.driver.memory=4g; may be repeated.",
        metavar="NAME=VALUE",
    ),
]
LOCAL = "local[*]"
ToTopic = Annotated[
    str, typer.Option("--to-topic", help="The topic to write to; made if there is none.", metavar="TOPIC")
]
ToParquet = Annotated[
    str, typer.Option("--to-parquet", help="The folder to write to, as Parquet.", metavar="PATH")
]
ByteKeys = Annotated[
    bool, typer.Option("--byte-keys", help="Write keys as bytes; without it they have to be text.")
]


def _job(function: Callable[..., None]) -> Callable[..., None]:
    """The command of a job, by the function's name: its options and help, and the options that all jobs have."""

    def command(
        url: Url = DEFAULT_URL,
        master: Master = LOCAL,
        conf: Conf = None,
        as_json: Json = False,
        **options: Any,
    ) -> None:
        from .spark_run import run_job

        run_job(function.__name__, url, options, master=master, conf=conf or (), as_json=as_json)

    common = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
    parameters = [*inspect.signature(function, eval_str=True).parameters.values(), *common]
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    )
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return spark_app.command(function.__name__, help=function.__doc__)(command)


@_job
def archive(
    topics: Topics,
    path: Annotated[
        str, typer.Option("--path", help="The archive: a path, or an s3://, gs://, hdfs:// URI.", metavar="P")
    ],
    file_mb: Annotated[
        int, typer.Option("--file-mb", min=1, help="MB of a ledger in a file, about.", metavar="N")
    ] = 256,
    trim: Annotated[
        bool,
        typer.Option(
            "--trim",
            help="Delete archived ledgers from the bookies. The topic goes on being read whole.",
        ),
    ] = False,
    with_backlog: Annotated[
        bool,
        typer.Option(
            "--with-backlog",
            help="With --trim: also what subscriptions have not read yet; they read it from P.",
        ),
    ] = False,
    moved: Annotated[
        bool,
        typer.Option(
            "--moved", help="The archive was copied to P: the topic looks for it there from now on."
        ),
    ] = False,
) -> None:
    """Closed ledgers to Parquet, with a manifest each.

    Run it again, every night say: ledgers that have their manifest are passed
    over, what a killed run left is done anew. spark.read.parquet reads the
    archive, magnetar spark replay --archive brings it back.

    With --trim the beginning of a topic, as far as nobody needs it, leaves the
    bookies once its files were read again. From then on Spark and the broker,
    for its consumers, read the files: both have to find P by that name wherever
    they run. Exit code 1 if an archive is damaged.
    """


@_job
def audit(
    topics: Topics,
    report: Annotated[
        bool,
        typer.Option(
            "--report/--no-report",
            help="Hand what other copies can heal to the repair queue, or only look.",
        ),
    ] = True,
    rows: Annotated[
        int, typer.Option("--rows", min=0, help="Show at most so many differences.", metavar="N")
    ] = 20,
    to_parquet: Annotated[
        str,
        typer.Option(
            "--to-parquet",
            help="Also write the whole table here: a row per bookie, range of entries and verdict.",
            metavar="PATH",
        ),
    ] = "",
) -> None:
    """Read every copy of every entry from its bookie, and compare them. Exit code
    1 if a copy is not ok.

    Verdicts: missing (the bookie does not have it), damaged (it cannot be read,
    or its digest is wrong), differs (from most of the other copies), disputed
    (copies differ, and none has a majority), unreachable (the bookie did not
    answer: no damage, and not reported). Of an open ledger the confirmed
    entries are audited, if all copies must be there by then.
    """


@_job
def compact(
    topic: Topic,
    to_topic: ToTopic = "",
    to_parquet: ToParquet = "",
    drop_keyless: Annotated[
        bool, typer.Option("--drop-keyless", help="Leave out messages that have no key; else all are kept.")
    ] = False,
    byte_keys: ByteKeys = False,
    compression: MessageCompression = "none",
) -> None:
    """The last message of each key, into a new topic or as Parquet. A message
    without value deletes its key.

    Last is what stands last in the topic, whatever its time. The target must be
    new; all of it becomes visible at once, and a job that fails leaves it
    empty. The topic itself stays as it is.
    """


@_job
def replay(
    to_topic: ToTopic,
    topics: SomeTopics = None,
    archive: Annotated[
        str, typer.Option("--archive", help="Replay from this archive and not from the topics.", metavar="P")
    ] = "",
    start: Start = "earliest",
    end: Annotated[
        str, typer.Option("--end", help="The same; not replayed itself.", metavar="WHERE")
    ] = "latest",
    from_offset: Annotated[
        int | None, typer.Option("--from-offset", min=0, help="The first message of each topic.", metavar="N")
    ] = None,
    before_offset: Annotated[
        int | None, typer.Option("--before-offset", min=0, help="Messages before this one.", metavar="N")
    ] = None,
    mark: Annotated[
        bool,
        typer.Option(
            "--mark",
            help="Say in each message's properties what it is a copy of: magnetar.replay.topic and .offset.",
        ),
    ] = False,
    byte_keys: ByteKeys = False,
    compression: MessageCompression = "none",
) -> None:
    """A range of topics, or of an archive, once more into another topic.

    Keys, values, properties, event times and the order within a topic are kept;
    times are those at which the broker stored messages, offsets count from 0.
    All becomes visible at once. Run twice, messages are there twice: --mark
    lets consumers tell.
    """


@_job
def rollup(
    topics: Topics,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="Where the query keeps how far it has come.", metavar="PATH")
    ],
    to_topic: ToTopic = "",
    to_parquet: ToParquet = "",
    window: Annotated[
        str, typer.Option("--window", help="Length of a window.", metavar="INTERVAL")
    ] = "1 minute",
    watermark: Annotated[
        str, typer.Option("--watermark", help="How late a message may come.", metavar="INTERVAL")
    ] = "10 minutes",
    without_key: Annotated[bool, typer.Option("--without-key", help="Figures per topic only.")] = False,
    start: Annotated[
        str,
        typer.Option(
            "--start",
            help="Where a new query begins, as for replay; one with a checkpoint goes on.",
            metavar="WHERE",
        ),
    ] = "earliest",
    once: Annotated[bool, typer.Option("--once", help="End when all that is there has been read.")] = False,
) -> None:
    """Messages and bytes per window of time, topic and key, as a stream; JSON into
    a topic, or Parquet.

    A window is told once, when the watermark has passed its end. Ctrl-C ends
    the query; started again with the same --checkpoint it goes on where it was,
    and counts nothing twice. With --once it is a job for cron.
    """
