"""Planted tasks without an owner, and the ways that are fine."""

import pytest

from lint import owners
from lint.sources import parse, production_sources, without_allowed

HEAD = "import asyncio\nfrom magnetar.runtime.tasks import LongTask, TaskSet, awaited, begin\n"


def lines(text: str, path: str = "broker/magnetar/broker/planted.py") -> list[int]:
    """The lines after the head that the lint names."""
    return [finding.line - 2 for finding in owners.check(parse(HEAD + text, path))]


@pytest.mark.parametrize(
    "planted",
    [
        "asyncio.create_task(work())",
        "task = asyncio.create_task(work())",
        "self._task = asyncio.get_running_loop().create_task(work(), name='rounds')",
        "self._task = self._loop.create_task(work())",
        "asyncio.ensure_future(work())",
        "from asyncio import create_task; create_task(work())",
        "awaited(work())",
        "LongTask('rounds', work)",
    ],
)
def test_rule_46_a_task_without_an_owner_is_found(planted: str) -> None:
    assert lines(planted) == [1]


@pytest.mark.parametrize(
    "fine",
    [
        "begin(work(), 'work')",
        "task = awaited(work())",
        "self._rounds = LongTask('rounds', work)",
        "tasks = TaskSet('work'); tasks.begin(work())",
        "async def f():\n    async with asyncio.TaskGroup() as group:\n        group.create_task(work())",
    ],
)
def test_a_task_with_an_owner_is_fine(fine: str) -> None:
    assert lines(fine) == []


def test_rule_46_no_task_of_the_product_is_without_an_owner_and_every_exception_is_needed() -> None:
    found = [finding for source in production_sources() for finding in owners.check(source)]
    assert without_allowed(found, owners.ALLOWED) == []
    for line in owners.ALLOWED:
        assert any(line.covers(finding.path, finding.rule) for finding in found), line
        assert len(line.reason.split()) >= 3, line
