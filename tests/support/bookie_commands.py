"""`magnetar bookie SUBCOMMAND` as an operator runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from magnetar.cli.app import app
from support.forked_commands import run_magnetar

__all__ = ["Run", "documented"]

PAGE = Path(__file__).parents[2] / "docs" / "bookie-operations.md"


def documented(command: str) -> set[str]:
    """The keys that the page names for a command."""
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{command}` |"))
    return set(re.findall(r"`(\w+)`", row.split("|")[2]))


class Run:
    """One run of `magnetar bookie ...` in this process; `as_process` goes the whole way."""

    def __init__(
        self, *arguments: str | int | Path, data: Path | None = None, as_process: bool = False
    ) -> None:
        line = ["bookie", *map(str, arguments)]
        if data is not None:
            line += ["--data", str(data)]
        if as_process:
            done = run_magnetar(*line)
            self.code, self.out, self.errors = done.returncode, done.stdout, done.stderr
        else:
            result = CliRunner().invoke(app, line)
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                raise result.exception
            self.code, self.out, self.errors = result.exit_code, result.stdout, result.stderr

    @property
    def lines(self) -> list[dict[str, Any]]:
        """JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def complaint(self) -> str:
        """The one line on standard error."""
        assert self.errors.count("\n") == 1, self.errors
        assert self.errors.startswith("magnetar: ")
        return self.errors.strip()
