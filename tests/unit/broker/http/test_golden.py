"""The recorded commands of pulsar-admin are answered as Pulsar answers them, but for what `pulsar_admin.known` names.

In order and over plain HTTP: a short form of `make test-pulsar-admin`, in which the real tool asks a real service.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pulsar_admin import golden
from pulsar_admin.known import KNOWN, explained, table
from pulsar_admin.replay import replay
from pulsar_admin.shell import commands
from support.admin_kit import administered

PAGE = Path(__file__).parents[4] / "docs" / "pulsar-admin.md"
ON_FAKES = "^brokers healthcheck"  # tests/integration/test_gateway.py asks a real one


@pytest.mark.asyncio(loop_factories=["uvloop"])  # real sockets
async def test_commands_are_answered_as_by_pulsar() -> None:
    async with administered() as admin:
        found = await replay(admin)
    unknown = {
        command: rest
        for command, differences in found.items()
        if not re.search(ON_FAKES, command)
        and (rest := [one for one in differences if explained(command, one) is None])
    }
    assert unknown == {}


def test_what_was_recorded_is_what_is_typed() -> None:
    assert [row["command"] for row in golden.rows()] == commands()
    assert sum(row["command"][0] != "!" for row in golden.rows()) > 400


def test_the_page_has_the_table_of_differences() -> None:
    assert table() in PAGE.read_text()
    assert len({row.what for row in KNOWN}) == len(KNOWN)
