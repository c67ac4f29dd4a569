"""A test that swallows the error of its time limit, as a loop that catches everything does, does not hold its worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]

# The hooks of the real one, which waits longer.
CONFTEST = f"""
import importlib.util

spec = importlib.util.spec_from_file_location("hooks", {str(TESTS / "conftest.py")!r})
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)
hooks.BACKSTOP_S = 0.2
globals().update((name, hook) for name, hook in vars(hooks).items() if name.startswith("pytest_"))
"""

STUCK = """
import time
import pytest

@pytest.mark.timeout(0.1)
def test_stuck():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass
"""


@pytest.mark.real
def test_a_synchronous_test_that_will_not_end_ends_its_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {TESTS} {TESTS.parent}\nasyncio_mode = auto\ntimeout = 150\nmarkers = real: x\n"
    )
    (tmp_path / "test_it.py").write_text(STUCK)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "in test_stuck" in done.stderr
