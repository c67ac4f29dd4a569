"""The pages: links that lead somewhere, goals that exist.

That what the pages show is true is tested by tests/integration/test_readme.py and by the tests of the Spark pages.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "bench").glob("*.md")]
)
ROOMS = ("proto", "bookie", "broker", "client", "tests/sim")
ROOM_PAGES = sorted(page for room in ROOMS for page in (REPOSITORY / room).glob("*.md"))
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r"[a-z]+:")


def anchors(page: str) -> set[str]:
    """Of the headings, as GitHub makes them: `## How fast, and why?` is #how-fast-and-why, a second one ends in -1."""
    seen: Counter[str] = Counter()
    found = set()
    for title in re.findall(
        r"^#+ +(.*?) *$", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S), re.MULTILINE
    ):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if ELSEWHERE.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize(
    "page", [*PAGES, *ROOM_PAGES], ids=lambda page: page.relative_to(REPOSITORY).as_posix()
)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One: and `two`\n# Again\n# Again\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    good = "# Here\n[a](other.md) [b](other.md#one-and-two) [c](other.md#again-1) [d](#here) `[e](x.md)` [f](https://x.example)\n"
    page.write_text(good)
    assert broken_links(page) == []
    page.write_text(
        good + "[g](gone.md) [h](other.md#gone) [i](#gone) [j](other.md#no-heading) ![k](gone.svg)"
    )
    assert broken_links(page) == ["gone.md", "other.md#gone", "#gone", "other.md#no-heading", "gone.svg"]


def test_the_readme_leads_to_every_page() -> None:
    links = set(LINK.findall((REPOSITORY / "README.md").read_text()))
    pages = {page.relative_to(REPOSITORY).as_posix() for page in PAGES} - {"README.md"}
    assert pages - links == set()


def test_goals_that_pages_name_exist() -> None:
    goals = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    named = {
        goal
        for page in PAGES
        for goal in re.findall(r"(?:^ {4}|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    assert named - goals == set()


def test_the_architecture_leads_to_every_page_of_a_room() -> None:
    text = (REPOSITORY / "ARCHITECTURE.md").read_text()
    named = {room.relative_to(REPOSITORY).as_posix() for room in ROOM_PAGES}
    assert {path for path in named if path not in text} == set()
