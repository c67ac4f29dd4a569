"""Small projects of tests, run by pytest with the plugins of this one: who must be marked, and who gets a second try."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

TESTS = Path(__file__).parents[2]

CONFTEST = """
import pytest
from support.real_tests import RealTests
from support.second_try import SecondTry

def pytest_addoption(parser):
    parser.addoption("--second-try", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "real: starts processes")
    config.pluginmanager.register(RealTests())
    if config.getoption("--second-try"):
        config.pluginmanager.register(SecondTry(config))
"""

BEGIN = """
import os, pathlib, subprocess, sys
import pytest

def once(name):
    "True the first time."
    mark = pathlib.Path(__file__).with_name(name)
    first = not mark.exists()
    mark.touch()
    return first

def start():
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
"""


def run(directory: Path, tests: str, *options: str) -> tuple[int, list[str]]:
    """(exit code, printed lines) of pytest over these tests."""
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\n")
    (directory / "test_it.py").write_text(BEGIN + tests)
    plugins = ["-p", "xdist"] if "-n" in options else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *options],
        cwd=directory,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout.splitlines()


FLAKY = """
@pytest.mark.real
def test_flaky():
    print("what it printed")
    assert not once("one"), "the first time"
"""

UVLOOP = """
import asyncio, uvloop

async def child():
    await (await asyncio.create_subprocess_exec("true")).wait()

def test_it():
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(child())
"""


def test_one_flake_costs_a_second_try(tmp_path: Path) -> None:
    code, lines = run(tmp_path, FLAKY + "\ndef test_other(): pass\n", "--second-try")
    assert code == 0
    assert lines[-2].startswith("1 passed, 1 flaky in ")
    assert lines[-1] == "FLAKY 1: test_it.py::test_flaky"
    record = (tmp_path / "build/flaky/test_it.py-test_flaky.txt").read_text()
    assert "AssertionError: the first time" in record
    assert "what it printed" in record


def test_it_holds_with_workers_and_for_fixtures(tmp_path: Path) -> None:
    tests = (
        FLAKY
        + """
@pytest.fixture
def stumbles():
    yield
    assert not once("fixture")

@pytest.mark.real
@pytest.mark.parametrize("number", [1])
def test_with_it(stumbles, number): pass
"""
    )
    code, lines = run(tmp_path, tests, "--second-try", "-n", "2")
    assert code == 0
    assert lines[-1].startswith("FLAKY 2: ")
    assert "test_it.py::test_with_it[1]" in lines[-1]


@pytest.mark.parametrize(
    ("tests", "options"),
    [
        pytest.param(FLAKY, [], id="nobody asked"),
        pytest.param(FLAKY.replace("@pytest.mark.real", ""), ["--second-try"], id="deterministic"),
        pytest.param(FLAKY + "\ndef test_other(): assert not once('o')\n", ["--second-try"], id="beside another"),
        pytest.param(FLAKY.replace('not once("one")', "False"), ["--second-try"], id="always"),
        pytest.param(FLAKY.replace("def", "@pytest.mark.parametrize('n', [1, 2, 3])\ndef", 1).replace(
            "test_flaky()", "test_flaky(n)").replace('"one"', "str(n)"), ["--second-try"], id="three"),
        pytest.param(FLAKY, ["--second-try", "-x"], id="cut short"),
        pytest.param(FLAKY + "\n@pytest.mark.real\ndef test_dies():\n    if once('d'): os._exit(3)\n",
                     ["--second-try", "-n", "1"], id="a worker died"),
        pytest.param("@pytest.mark.real\ndef test_it():\n    if not once('s'): pytest.skip('no')\n    assert False\n",
                     ["--second-try"], id="skipped is not passed"),
    ],
)  # fmt: skip
def test_anything_else_stays_red(tmp_path: Path, tests: str, options: list[str]) -> None:
    code, lines = run(tmp_path, tests, *options)
    assert code != 0
    assert not any(line.startswith("FLAKY") for line in lines)
    assert " failed" in "\n".join(lines[-2:])


@pytest.mark.parametrize(
    "tests",
    [
        "def test_it(): start()",
        "def test_it():\n    child = os.fork()\n    if not child: os._exit(0)\n    os.waitpid(child, 0)",
        "@pytest.fixture\ndef service(): start()\ndef test_it(service): pass",
        "@pytest.fixture\ndef service():\n    yield\n    start()\ndef test_it(service): pass\ndef test_b(): pass",
        UVLOOP,
    ],
    ids=["a process", "a fork", "in a fixture", "at the end of a fixture", "of uvloop"],
)
def test_a_test_that_starts_a_process_says_so(tmp_path: Path, tests: str) -> None:
    code, lines = run(tmp_path, tests)
    assert code == 1
    assert sum("it starts a process and is not marked `@pytest.mark.real`" in line for line in lines) >= 1
    marked = tests.replace("def test_it", "@pytest.mark.real\ndef test_it")
    assert run(tmp_path, marked)[0] == 0


def test_what_a_shared_fixture_starts_counts_for_every_test_that_uses_it(tmp_path: Path) -> None:
    tests = """
@pytest.fixture(scope="session")
def service(): start()

@pytest.fixture
def client(service): pass

@pytest.mark.real
def test_first(service): pass

def test_second(client): pass

def test_third(): pass
"""
    code, lines = run(tmp_path, tests, "-rA")
    assert code == 1
    assert lines[-1].startswith("2 passed, 1 error in ")
    assert any(line.startswith("ERROR") and "test_second" in line for line in lines)
