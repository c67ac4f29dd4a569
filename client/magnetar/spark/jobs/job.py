"""A job: its arguments, declared once as fields; a check of them that needs no Spark; its work in a session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from pyspark.sql import SparkSession

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Job(Protocol[R_co]):
    """One call of a job: its fields are the arguments."""

    def check(self) -> object:
        """Raises what `run` would raise for these arguments, without Spark and in the time of a few requests."""

    def run(self, spark: SparkSession) -> R_co:
        """Does the work in this session."""


def checks(job: Callable[P, Job[Any]]) -> Callable[P, None]:
    """The function that checks the arguments of a job."""

    @functools.wraps(job.check, assigned=("__doc__",), updated=())  # type: ignore[attr-defined]
    def check(*args: P.args, **named: P.kwargs) -> None:
        job(*args, **named).check()

    return check


def runs(job: Callable[P, Job[R]]) -> Callable[Concatenate[SparkSession, P], R]:
    """The function that checks the arguments of a job and runs it in a session."""

    @functools.wraps(job.run, assigned=("__doc__",), updated=())  # type: ignore[attr-defined]
    def run(spark: SparkSession, /, *args: P.args, **named: P.kwargs) -> R:
        return job(*args, **named).run(spark)

    return run
