"""`make long`: every goal is run, whichever fails, and the table says how each ended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.long_run import main

MAKE = (
    sys.executable,
    "-c",
    "import sys; print(f'of {sys.argv[1]}'); print('3 passed'); sys.exit(sys.argv[1] == 'sim')",
)


@pytest.mark.real
def test_a_goal_that_fails_stops_none_behind_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "crash"], MAKE, tmp_path) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [(row[0], row[1], row[3:]) for row in rows] == [
        ("sim", "FAILED", ["3", "passed"]),
        ("crash", "passed", ["3", "passed"]),
    ]
    assert (tmp_path / "crash.log").read_text() == "of crash\n3 passed\n"
    assert main(["crash"], MAKE, tmp_path) == 0
