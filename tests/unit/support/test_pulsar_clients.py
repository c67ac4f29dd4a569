"""What `make test-pulsar` compares."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pulsar", reason="there is no pulsar-client for this Python")

import pulsar_clients.scenarios  # noqa: F401 - registers them
from pulsar_admin.known import table
from pulsar_clients import golden, others
from pulsar_clients.known import KNOWN
from pulsar_clients.others import OTHERS, Other
from pulsar_clients.program import SCENARIOS, Id, Program, comparable
from pulsar_clients.run import clients, report

PAGE = Path(__file__).parents[3] / "docs" / "pulsar-clients.md"
T = "persistent://public/default/t"


def test_ids_are_ordinals_in_the_order_of_each_topic() -> None:
    seen = {
        "a": Id(T, -1, 7, 30, -1),
        "b": [Id(T, -1, 7, 4, 2)],
        "c": Id(T, 1, 7, 99, -1),
        "d": Id(T, -1, -1, -1, -1),
    }
    assert comparable(seen) == {"a": "1", "b": ["0[2]"], "c": "0@1", "d": "none"}
    assert comparable({name: one for name, one in seen.items() if name != "b"})["a"] == "0"


def test_topics_are_shown_without_what_is_unique() -> None:
    program = Program("one", "7f", "", "", None)  # type: ignore[arg-type]
    assert program.shown(program.topic("t")) == T


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"seen": {"got": ["a", "c"]}}, [".got[1] is 'c', not 'b'"]),
        ({"seen": {"got": ["a"]}}, [".got is ['a'], not ['a', 'b']"]),
        ({"seen": {"other": 1}}, [".got is missing", ".other is more: 1"]),
        ({"failed": "Timeout"}, [" failed Timeout, not seen {'got': ['a', 'b']}"]),
    ],
)
def test_each_difference_is_noticed(found: dict[str, object], said: list[str]) -> None:
    wanted = {"seen": {"got": ["a", "b"]}}
    assert golden.compared(wanted, wanted) == []
    assert golden.compared(wanted, found) == said
    text, unexplained = report("c", {"one": wanted, "two": wanted}, {"one": found, "two": wanted}, Counter())
    assert unexplained == 1
    assert text.endswith("c: 2 scenarios, 1 the same, 0 differ as the table says, 1 unexplained\n")


def test_a_scenario_without_a_result_is_unexplained() -> None:
    assert report("c", {"one": {"seen": 1}}, {}, Counter())[1] == 1


def test_every_scenario_is_recorded_of_every_client() -> None:
    for client in clients(""):
        rows = golden.read(client.name)
        assert set(rows) == set(SCENARIOS), "make record-pulsar"
        assert not [name for name, row in rows.items() if "failed" in row]


def test_the_page_of_features_names_scenarios() -> None:
    page = PAGE.with_name("coming-from-pulsar.md").read_text()
    features = page[page.index("## What works") : page.index("## What differs")].partition("|---|---|\n")[2]
    named = re.findall(r"`(\w+)`", features)
    assert len(named) > 100
    known = set(SCENARIOS).union(*[golden.read(other.name) for other in OTHERS])
    assert sorted(set(named) - known) == []


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.name)
def test_scenarios_of_others_are_recorded(other: Other) -> None:
    folder = Path(others.__file__).parent
    pattern, files = {
        "java": (r"public static Object (\w+)\(Program", folder.glob("java/*.java")),
        "go": (r"func \(Scenarios\) (\w+)\(", folder.glob("go/*.go")),
        "tools": (r"^async def ([a-z]\w+)\(t: Tools", folder.glob("tools.py")),
    }[next(kind for kind in ("java", "go", "tools") if kind in other.name)]
    names = {one for file in files for one in re.findall(pattern, file.read_text(), re.MULTILINE)}
    rows = golden.read(other.name)
    assert set(rows) == {re.sub("(?<!^)([A-Z])", r"_\1", one).lower() for one in names}, "make record-pulsar"
    assert not [name for name, row in rows.items() if "failed" in row]


def test_the_page_has_the_table() -> None:
    assert table(KNOWN) in PAGE.read_text()
    assert len({row.what for row in KNOWN}) == len(KNOWN)
