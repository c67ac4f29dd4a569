"""The pages in docs/: the Python of each in one process, in order, as it stands, with what it prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.pages import blocks_of, same
from support.service import Service
from support.spark_programs import Program, spark_environment

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300, func_only=True)]

TESTS = Path(__file__).parents[2]
PAGE = TESTS.parent / "docs" / "spark-tutorial.md"
ROLLUP, JOB = PAGE.with_name("spark-rollup.md"), PAGE.with_name("spark-job.md")


@pytest.mark.spark
@pytest.mark.real
def test_the_tutorial_prints_what_it_shows(service: Service, tmp_path: Path) -> None:
    assert check(PAGE, service, tmp_path) >= 10
    # The picture is that of the page; another release of matplotlib may draw it in other bytes.
    assert (tmp_path / "spark-tutorial.svg").read_text().startswith("<?xml")
    assert (PAGE.parent / "spark-tutorial.svg").read_text().count("<path") > 20


@pytest.mark.spark
@pytest.mark.real
def test_the_rollup_step_by_step_prints_what_it_shows(tmp_path: Path) -> None:
    service = Service(tmp_path / "data")  # in that of all tests other messages may be in topics of that name
    service.start()
    try:
        assert check(ROLLUP, service, tmp_path) == 5
    finally:
        service.stop()


@pytest.mark.spark
@pytest.mark.real
def test_the_job_prints_what_it_shows(service: Service, tmp_path: Path) -> None:
    assert check(JOB, service, tmp_path) == 5


def check(page: Path, service: Service, folder: Path) -> int:
    """Returns how many blocks were run."""
    environment = spark_environment(folder, [], PYTHONPATH=str(TESTS))
    command = [sys.executable, "-m", "support.pages", "check", str(page), service.url]
    return Program(command, folder, environment).result(280).count(f"{page.name}:")


def test_a_page_that_shows_something_else_is_noticed() -> None:
    (block,) = blocks_of("text\n\n```python\nprint(1)\n```\n\n```text\n1\n...\n3\n```\n")
    assert block.code == "print(1)\n"
    assert block.line == 4
    assert block.output is not None
    assert same(block.output, "1\n2\n2\n3\n")
    assert not same(block.output, "1\n2\n4\n")
