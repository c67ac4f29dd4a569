"""`magnetar spark JOB`: names, options and help of the pipeline's jobs. The work is in spark_jobs and magnetar.spark.jobs.

Nothing here imports Spark: half a gigabyte that most installations do not have.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .options import DEFAULT_URL, Json, Topic, Url

spark_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Batch work on topics, on Spark: archive, audit, compact, replay, rollup.",
)

Topics = Annotated[list[str], typer.Argument(help="One or more topics.", metavar="TOPIC...")]
SomeTopics = Annotated[
    list[str] | None, typer.Argument(help="One or more topics; of an archive, all.", metavar="TOPIC...")
]
Master = Annotated[
    str,
    typer.Option(
        "--master", envvar="SPARK_MASTER", help="Where Spark runs; this machine by default.", metavar="MASTER"
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", help="A setting of Spark; may be repeated.", metavar="NAME=VALUE"),
]
LOCAL = "local[*]"
ToTopic = Annotated[str, typer.Option("--to-topic", help="The topic to write to.", metavar="TOPIC")]
ToParquet = Annotated[str, typer.Option("--to-parquet", help="The folder to write to.", metavar="PATH")]
ByteKeys = Annotated[
    bool, typer.Option("--byte-keys", help="Write keys as bytes; without it they have to be text.")
]
Compression = Annotated[
    str, typer.Option("--compression", help="Of messages: none, lz4 or zstd.", metavar="NAME")
]


@spark_app.command("archive")
def archive(
    topics: Topics,
    path: Annotated[
        str, typer.Option("--path", help="The archive: a path, or an s3://, gs://, hdfs:// URI.", metavar="P")
    ],
    file_mb: Annotated[
        int, typer.Option("--file-mb", min=1, help="MB of a ledger in a file, about.", metavar="N")
    ] = 256,
    trim: Annotated[
        bool, typer.Option("--trim", help="Delete archived ledgers from the bookies: not offered yet.")
    ] = False,
    url: Url = DEFAULT_URL,
    master: Master = LOCAL,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Closed ledgers to Parquet with a manifest each. Run it again for what has been closed since."""
    from . import spark_jobs

    with spark_jobs.session(master, conf) as spark:
        spark_jobs.archive(spark, url, topics, path, file_mb=file_mb, trim=trim, as_json=as_json)


@spark_app.command("audit")
def audit(
    topics: Topics,
    to_parquet: ToParquet = "",
    url: Url = DEFAULT_URL,
    master: Master = LOCAL,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """Read every copy of every entry and compare them. Exit code 1 if a copy is not ok."""
    from . import spark_jobs

    with spark_jobs.session(master, conf) as spark:
        spark_jobs.audit(spark, url, topics, to_parquet=to_parquet, as_json=as_json)


@spark_app.command("compact")
def compact(
    topic: Topic,
    to_topic: ToTopic = "",
    to_parquet: ToParquet = "",
    drop_keyless: Annotated[
        bool, typer.Option("--drop-keyless", help="Leave out messages that have no key.")
    ] = False,
    byte_keys: ByteKeys = False,
    compression: Compression = "none",
    url: Url = DEFAULT_URL,
    master: Master = LOCAL,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """The last message of each key, into a new topic or as Parquet. A message without value deletes its key."""
    from . import spark_jobs

    with spark_jobs.session(master, conf) as spark:
        spark_jobs.compact(
            spark,
            url,
            topic,
            to_topic=to_topic,
            to_parquet=to_parquet,
            keyless="drop" if drop_keyless else "keep",
            text_keys=not byte_keys,
            compression=compression,
            as_json=as_json,
        )


@spark_app.command("replay")
def replay(
    to_topic: ToTopic,
    topics: SomeTopics = None,
    archive: Annotated[
        str, typer.Option("--archive", help="Replay from this archive and not from the topics.", metavar="P")
    ] = "",
    start: Annotated[
        str,
        typer.Option(
            "--start",
            help="earliest, latest, a message id, or a time with its zone: 2026-01-31T12:00:00Z.",
            metavar="WHERE",
        ),
    ] = "earliest",
    end: Annotated[
        str, typer.Option("--end", help="The same; not replayed itself.", metavar="WHERE")
    ] = "latest",
    from_offset: Annotated[
        int | None, typer.Option("--from-offset", min=0, help="The first message of each topic.", metavar="N")
    ] = None,
    before_offset: Annotated[
        int | None, typer.Option("--before-offset", min=0, help="Messages before this one.", metavar="N")
    ] = None,
    byte_keys: ByteKeys = False,
    compression: Compression = "none",
    url: Url = DEFAULT_URL,
    master: Master = LOCAL,
    conf: Conf = None,
    as_json: Json = False,
) -> None:
    """A range of topics, or of an archive, once more into another topic."""
    from . import spark_jobs

    with spark_jobs.session(master, conf) as spark:
        spark_jobs.replay(
            spark,
            url,
            to_topic=to_topic,
            topics=topics or [],
            archive=archive,
            start=start,
            end=end,
            from_offset=from_offset,
            before_offset=before_offset,
            text_keys=not byte_keys,
            compression=compression,
            as_json=as_json,
        )


@spark_app.command("rollup")
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
    once: Annotated[bool, typer.Option("--once", help="End when all that is there has been read.")] = False,
    url: Url = DEFAULT_URL,
    master: Master = LOCAL,
    conf: Conf = None,
) -> None:
    """Messages and bytes per window, topic and key, as a stream. Ctrl-C ends it; it goes on from its checkpoint."""
    from . import spark_jobs

    with spark_jobs.session(master, conf) as spark:
        spark_jobs.rollup(
            spark,
            url,
            topics,
            checkpoint=checkpoint,
            to_topic=to_topic,
            to_parquet=to_parquet,
            window=window,
            watermark=watermark,
            by_key=not without_key,
            once=once,
        )
