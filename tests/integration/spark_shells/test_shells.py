"""`pyspark`, `spark-submit` and a plain script: topics are there without registering, with the extra `spark` alone."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.service import Service
from support.spark_programs import Program, only_the_spark_extra, spark_environment
from support.spark_topics import Topics

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(300, func_only=False),
    pytest.mark.real,
]

BIN = Path(sys.executable).parent
README = Path(__file__).parents[3] / "README.md"
SESSION = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
"""
# Line by line as into a shell.
COPY = """
url, source, target = "{url}", "{source}", "{target}"
lines = spark.read.format("magnetar").option("service_url", url).load(source)
rows = lines.selectExpr("key", "upper(string(value)) AS value")
rows.write.format("magnetar").option("service_url", url).mode("append").save(target)
print("read back:", spark.read.format("magnetar").option("service_url", url).load(target).count())
"""


@pytest.fixture(scope="module")
def folder(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they run."""
    Topics(service).produce("orders", [b"one", b"two", b"three"])
    return tmp_path_factory.mktemp("shells")


@pytest.fixture(scope="module")
def blocked(folder: Path) -> str:
    """PYTHONPATH."""
    return str(only_the_spark_extra(folder / "blocked"))


@pytest.fixture(scope="module")
def said(service: Service, folder: Path, blocked: str) -> Iterator[dict[str, str]]:
    """What each said; they run at the same time, for most of it is waiting for a JVM."""
    activated = spark_environment(folder, [BIN], PYTHONPATH=blocked)
    # Told that it is interactive it reads its start-up file, as at a terminal; so it would wait for lines there.
    shell = {**activated, "PYSPARK_DRIVER_PYTHON_OPTS": "-i"}

    def copying(target: str) -> str:
        return COPY.format(url=service.url, source="orders", target=target)

    (folder / "submitted.py").write_text(SESSION + copying("by-submit"))
    programs = {
        "by-shell": Program(["pyspark", "--master", "local[2]"], folder, shell, copying("by-shell")),
        "by-submit": Program(["spark-submit", "--master", "local[2]", "submitted.py"], folder, activated),
    }
    try:
        yield {target: program.result(280) for target, program in programs.items()}
    finally:
        for program in programs.values():
            program.kill()


@pytest.mark.spark
@pytest.mark.parametrize("target", ["by-shell", "by-submit"])
def test_reads_and_writes_a_topic(said: dict[str, str], topics: Topics, target: str) -> None:
    assert "read back: 3" in said[target], said[target][-6000:]
    assert sorted(topics.values(target)) == [b"ONE", b"THREE", b"TWO"]  # type: ignore[type-var]
    assert warnings_of_ours(said[target]) == []


def test_the_readme_in_a_plain_script(service: Service, topics: Topics, folder: Path, blocked: str) -> None:
    """As a notebook kernel or cron runs it: by its path, in no activated environment."""
    (readme,) = re.findall(r"^```py\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (folder / "readme.py").write_text(readme.replace("magnetar://127.0.0.1:7650", service.url))
    bare = spark_environment(folder, [], PYTHONPATH=blocked)
    program = Program([sys.executable, "readme.py"], folder, bare)
    try:
        said = program.result(280)
    finally:
        program.kill()
    assert sorted(topics.values("sizes")) == [b"length 3", b"length 3", b"length 5"]  # type: ignore[type-var]
    assert topics.values("orders-copy") == [b"one", b"two", b"three"]
    assert warnings_of_ours(said) == []


def warnings_of_ours(said: str) -> list[str]:
    """Lines on the screen."""
    lines = [line for line in said.splitlines() if "Warning" in line or "magnetar" in line.lower()]
    return [line for line in lines if not line.lstrip().startswith((">>>", "...")) and " INFO " not in line]
