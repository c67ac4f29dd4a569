"""Text scenarios: a command, `----`, and what a core answers to it, up to a blank line; `#` begins a comment.

MAGNETAR_REWRITE=1 writes what the cores did into the files; read the difference before it is committed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "scenarios"


def scenario_files(kind: str) -> list[Path]:
    """tests/scenarios/KIND_*.txt, in order."""
    return sorted(_FOLDER.glob(f"{kind}_*.txt"))


def play(text: str, answer: Callable[[str], list[str]]) -> str:
    """The text with the lines that `answer` has for each command."""
    output: list[str] = []
    expecting = False
    command = ""
    for line in text.splitlines():
        if line == "----":
            output += ["----", *answer(command)]
            expecting = True
        elif expecting:
            if not line:
                output.append("")
                expecting = False
        else:
            if line and not line.startswith("#"):
                command = line
            output.append(line)
    return "\n".join(output) + "\n"


def check(path: Path, run_scenario: Callable[[str], str]) -> None:
    """Asserts that the cores do what stands in the file."""
    text = path.read_text()
    done = run_scenario(text)
    if os.environ.get("MAGNETAR_REWRITE"):
        path.write_text(done)
    assert done == text
