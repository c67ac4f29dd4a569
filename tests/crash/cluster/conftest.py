"""What the runs of a cluster share: ZooKeeper, a directory, and the one table at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from support.cluster.scorecard import Recorder, recorder, rows_of, table
from support.zookeeper import Ensemble, ensemble_or_skip


@pytest.fixture
def three_servers(tmp_path: Path) -> Iterator[Ensemble]:
    """An ensemble of three."""
    with ensemble_or_skip(tmp_path / "zookeeper", 3) as ensemble:
        ensemble.start()
        yield ensemble


@pytest.fixture
def one_server(tmp_path: Path) -> Iterator[Ensemble]:
    """A lone server, which starts faster."""
    with ensemble_or_skip(tmp_path / "zookeeper") as ensemble:
        ensemble.start()
        yield ensemble


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of the daemons; its name is that of the cluster's root in ZooKeeper."""
    (tmp_path / "cluster").mkdir()
    return tmp_path / "cluster"


@pytest.fixture
def scorecard(request: pytest.FixtureRequest) -> Recorder:
    """Takes rows for the table."""
    return recorder(request.node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One table of all rows."""
    rows = rows_of([report for reports in terminalreporter.stats.values() for report in reports])
    if rows:
        console = Console(width=150, highlight=False)
        with console.capture() as text:
            console.print(table(rows))
        terminalreporter.write_line("")
        terminalreporter.write_line(text.get())
