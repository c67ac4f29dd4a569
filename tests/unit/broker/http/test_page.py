"""The commands of docs/http.md do what the page says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from support.admin_kit import Admin, administered
from support.pages import blocks_of

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # real sockets
PAGE = Path(__file__).parents[4] / "docs" / "http.md"


async def curl(admin: Admin, line: str) -> str:
    """What `curl` would print."""
    words = shlex.split(line)[1:]
    url = next(word for word in words if word.startswith("localhost:8080"))
    method = words[words.index("-X") + 1] if "-X" in words else "GET"
    body = words[words.index("-d") + 1].encode() if "-d" in words else None
    answer = await admin(method, url.removeprefix("localhost:8080"), raw=body)
    return "" if answer.body is None else json.dumps(answer.body)


async def test_the_commands_of_the_page_do_what_it_shows() -> None:
    blocks = [block.code.splitlines() for block in blocks_of(PAGE.read_text())]
    assert len(blocks) == 4
    async with administered() as admin:
        for lines in blocks:
            for line, following in zip(lines, [*lines[1:], "$"], strict=True):
                if line.startswith("$ "):
                    printed = await curl(admin, line.removeprefix("$ "))
                    start, dots, _ = ("" if following.startswith("$") else following).partition("...")
                    assert printed.startswith(start) if dots else printed == start, line
