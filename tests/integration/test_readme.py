"""The README's tour, run as it stands: console blocks in a shell, Python blocks in a Python, against a real service."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.service import Service

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What the tour does in its first block is done by the fixture: install and start.
SET_UP = ("make setup", ". .venv/bin/activate", "magnetar standalone")


def blocks() -> list[tuple[str, str]]:
    return BLOCK.findall(README.read_text())


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    started = Service(tmp_path / "data")
    started.start()
    yield started
    started.stop()


def run(arguments: list[str] | str, service: Service, tmp_path: Path) -> str:
    done = subprocess.run(
        arguments,
        shell=isinstance(arguments, str),
        cwd=tmp_path,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "MAGNETAR_URL": service.url},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_tour_works_as_it_is_written(service: Service, tmp_path: Path) -> None:
    ran = 0
    for language, text in blocks():
        if language == "python":
            out = run(
                [sys.executable, "-c", text.replace("magnetar://127.0.0.1:7650", service.url)],
                service,
                tmp_path,
            )
            assert out.strip(), text
            ran += 1
            continue
        for block in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = block.partition("\n")
            if command in SET_UP:
                continue
            out = run(command, service, tmp_path)
            if expected.strip():
                assert out.strip() == expected.strip(), command
            ran += 1
    assert ran >= 8
