"""Text scenarios: a command, `----`, and what a core answers to it, up to a blank line; `#` begins a comment.

MAGNETAR_REWRITE=1 writes what the cores did into the files; read the difference before it is committed.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "scenarios"


def scenario_files(kind: str) -> list[Path]:
    """tests/scenarios/KIND_*.txt, in order."""
    return sorted(_FOLDER.glob(f"{kind}_*.txt"))


def play(text: str, answer: Callable[[str], list[str]]) -> str:
    """The text with the lines that `answer` has for each command."""
    commands = _Commands(text)
    for command in commands:
        commands.answered(answer(command))
    return commands.done()


async def play_async(text: str, answer: Callable[[str], Awaitable[list[str]]]) -> str:
    """The same."""
    commands = _Commands(text)
    for command in commands:
        commands.answered(await answer(command))
    return commands.done()


class _Commands:
    """Those of a text, one after another: each is to be answered before the next one is asked for."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._output: list[str] = []

    def __iter__(self) -> Iterator[str]:
        expecting = False
        command = ""
        for line in self._text.splitlines():
            if line == "----":
                self._output.append(line)
                yield command
                expecting = True
            elif expecting:
                if not line:
                    self._output.append("")
                    expecting = False
            else:
                if line and not line.startswith("#"):
                    command = line
                self._output.append(line)

    def answered(self, lines: list[str]) -> None:
        """What comes in the place of the lines that stand there."""
        self._output += lines

    def done(self) -> str:
        """The text as it is now."""
        return "\n".join(self._output) + "\n"


def check(path: Path, run_scenario: Callable[[str], str]) -> None:
    """Asserts that the cores do what stands in the file."""
    text = path.read_text()
    done = run_scenario(text)
    if os.environ.get("MAGNETAR_REWRITE"):
        path.write_text(done)
    assert done == text
