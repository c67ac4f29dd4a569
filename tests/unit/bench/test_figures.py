"""What a comparison reads from the JSON files of the benchmarks, and what it says about it."""

import argparse
import io
import json

import pytest
from bench.compare.driver import Part
from bench.compare.main import parse, parse_parts
from bench.compare.report import Pair, document, print_rows, rows
from bench.figures import Figure, Gathered, Run, read_run
from rich.console import Console


def run_of(*rates: float, others: float = 0.0) -> Run:
    """A run of (a) with these rounds."""
    return Run({"a": Figure("(a) unbatched", "msg/s", True, list(rates))}, others)


def test_what_was_gathered_is_read_again() -> None:
    gathered = Gathered()
    gathered.add("a", 300.0, "(a) unbatched", "msg/s", higher=True)
    gathered.add("a", 310.0, "(a) unbatched", "msg/s", higher=True)
    gathered.add("cpu", 2.5, "CPU", "us/msg")
    text = json.dumps({"figures": gathered.document(), "others": 0.25, "rounds": []})
    assert read_run(json.loads(text)) == Run(
        {
            "a": Figure("(a) unbatched", "msg/s", True, [300.0, 310.0]),
            "cpu": Figure("CPU", "us/msg", False, [2.5]),
        },
        0.25,
    )


def test_a_figure_that_has_no_meaningful_ratio_is_not_compared() -> None:
    figure = {"label": "added", "unit": "ms", "higher": False, "rounds": [0.1], "compared": False}
    assert read_run({"figures": {"added": figure}, "others": 0}).figures == {}


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"figures": {}},
        {"others": 0.0},
        {"figures": {"a": {"median": 3.0}}, "others": 0.0},
        {"figures": {"a": 3.0}, "others": 0.0},
        {"figures": [], "others": 0.0},
        [],
    ],
)
def test_a_file_without_figures_says_so(damaged: object) -> None:
    with pytest.raises(ValueError, match="no figures to compare"):
        read_run(damaged)  # type: ignore[arg-type]


def test_values_of_one_round_stay_a_pair() -> None:
    part = Part("", "a")
    pairs = {
        part: [Pair(run_of(100.0 * number), run_of(50.0 * number, others=0.5)) for number in range(1, 8)]
    }
    row = rows(pairs, threshold=0.05, confidence=0.95)["a/a"]
    assert row.compared.interval == pytest.approx((1.0, 1.0))  # whatever the machine did from round to round
    assert row.compared.verdict == "worse"
    assert row.others == 0.25
    assert (row.base[0], row.ours[0]) == (100.0, 50.0)


def test_a_figure_that_one_side_lacks_in_a_round_is_left_out_there() -> None:
    part = Part("ledger", "b")
    without = Run({}, 0.0)
    pairs = {part: [Pair(run_of(1.0), without), Pair(without, run_of(1.0)), Pair(run_of(2.0), run_of(2.0))]}
    row = rows(pairs, threshold=0.05, confidence=0.95)["ledger:b/a"]
    assert row.base == row.ours == [2.0]
    assert row.label == "ledger: (a) unbatched"
    assert rows({part: [Pair(run_of(1.0), without)]}, threshold=0.05, confidence=0.95) == {}


def test_the_table_names_verdicts_and_a_busy_machine() -> None:
    pairs = {
        Part("", "a"): [Pair(run_of(100.0), run_of(80.0, others=0.6)) for _ in range(8)],
        Part("bookie", "a"): [Pair(run_of(100.0), run_of(80.0)) for _ in range(3)],
    }
    found = rows(pairs, threshold=0.05, confidence=0.95)
    screen = io.StringIO()
    print_rows(found, "ours beside base", Console(file=screen, width=160, highlight=False))
    text = screen.getvalue()
    assert "ours beside base" in text
    assert "+25.0%" in text
    assert "too few rounds: 3 more" in text
    assert "1 worse, 1 too few rounds" in text
    assert "Others used more than 15% of the cores" in text
    written = json.loads(json.dumps(document(found, {"rounds": 8})))
    assert written["figures"]["a/a"]["compared"]["verdict"] == "worse"
    assert written["figures"]["a/a"]["base"] == [100.0] * 8


def test_parts_are_workloads_or_whole_benchmarks() -> None:
    assert parse_parts("a,d") == [Part("", "a"), Part("", "d")]
    assert parse_parts("service:a, ledger:bc") == [Part("", "a"), Part("ledger", "b"), Part("ledger", "c")]
    assert [part.workload for part in parse_parts("service")] == list("abcdefghi")
    assert parse_parts("bookie") == [Part("bookie", letter) for letter in "abcd"]
    assert parse_parts("a,a") == [Part("", "a")]
    assert [str(part) for part in parse_parts("a,ledger:b")] == ["a", "ledger:b"]


@pytest.mark.parametrize("text", ["z", "bookie:z", "spark", "broker:a", ":a", "", ","])
def test_a_workload_that_does_not_exist_is_refused_by_name(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"there are service: a, b|names no workload"):
        parse_parts(text)


def test_the_command_line_has_percentages_and_its_own_defaults() -> None:
    given = parse(["--base", "main", "--threshold", "3"])
    assert (given.base, given.threshold, given.confidence, given.rounds) == ("main", 0.03, 0.95, 8)
    assert parse([]).base == "HEAD"
    for wrong in (["--rounds", "0"], ["--threshold", "0"], ["--confidence", "100"], ["--only", "x"]):
        with pytest.raises(SystemExit):
            parse(wrong)
