"""`pytest --second-try`: a run in which only one or two tests of processes failed runs them once more, alone.

    pytest --second-try -n 2 tests

    ... 6344 passed, 17 skipped, 1 flaky in 480.12s
    FLAKY 1: tests/crash/test_kill.py::test_a_kill

Each test runs in a fresh process, after all others have ended. If all of them pass, the run is green; the first failure
stays to be read in build/flaky. Anything else leaves the run red: a failed test without the marker `real`, more than two, a
run that was cut short, a worker that died. Why only tests of processes: see `support.real_tests`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["SecondTry"]

AT_MOST = 2
LIMIT_S = 600


class SecondTry:
    """A plugin of the process that prints the result, not of workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._flaky: list[str] = []

    @pytest.hookimpl(trylast=True)  # the workers have ended
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Turn the result to green if what failed passes now."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or exitstatus != pytest.ExitCode.TESTS_FAILED:
            return
        if session.shouldfail or session.shouldstop:
            return
        failed = [report for kind in ("failed", "error") for report in reporter.stats.get(kind, ())]
        if not all(isinstance(report, pytest.TestReport) and "real" in report.keywords for report in failed):
            return
        names = list(dict.fromkeys(report.nodeid for report in failed))
        if not 0 < len(names) <= AT_MOST:
            return
        reporter.ensure_newline()
        for name in names:
            reporter.write_line(f"second try, alone: {name}")
            if (output := self._run(name)) is not None:
                reporter.section("the second try failed, too")
                reporter.write_line(output)
                return
        self._keep(names, failed)
        self._flaky = names
        for kind in ("failed", "error"):
            reporter.stats.pop(kind, None)
        reporter.stats["flaky"] = failed
        session.exitstatus = pytest.ExitCode.OK

    def pytest_unconfigure(self) -> None:
        """The last line."""
        if self._flaky:
            self._config.get_terminal_writer().line(f"FLAKY {len(self._flaky)}: {' '.join(self._flaky)}")

    def _run(self, name: str) -> str | None:
        """None when it passes; otherwise what it printed."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--no-header",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            name,
        ]
        try:
            done = subprocess.run(
                command,
                cwd=self._config.rootpath,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired as error:
            return f"it ran for more than {LIMIT_S} s\n{error.output or ''}"
        passed = done.returncode == 0 and re.search(r"^1 passed\b(?!.*skipped)", done.stdout, re.MULTILINE)
        return None if passed else done.stdout

    def _keep(self, names: list[str], failed: list[pytest.TestReport]) -> None:
        folder = self._config.rootpath / "build" / "flaky"
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            text = "\n\n".join(_text(report) for report in failed if report.nodeid == name)
            Path(folder, re.sub(r"[^\w.-]+", "-", name)[:200] + ".txt").write_text(text, errors="replace")


def _text(report: pytest.TestReport) -> str:
    captured = [f"--- {title} ---\n{content}" for title, content in report.sections]
    return "\n".join(
        [f"{report.nodeid}, {report.when}, {report.duration:.1f} s", report.longreprtext, *captured]
    )
