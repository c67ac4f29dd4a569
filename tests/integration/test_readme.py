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


# From here on the service is stopped.
OPERATING = "## Operating a bookie\n"
NUMBER = re.compile(r"\d[\d,]*")


def blocks(text: str) -> list[tuple[str, str]]:
    return BLOCK.findall(text)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(command, what it prints) of a console block."""
    for block in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = block.partition("\n")
        yield command, expected.strip()


def shape(text: str) -> list[str]:
    """Lines without their numbers and their widths."""
    lines = [" ".join(NUMBER.sub("N", line).split()) for line in text.splitlines()]
    return [re.sub("─+", "─", line) for line in lines if line]


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
    tour, _ = README.read_text().split(OPERATING)
    ran = 0
    for language, text in blocks(tour):
        if language == "python":
            out = run(
                [sys.executable, "-c", text.replace("magnetar://127.0.0.1:7650", service.url)],
                service,
                tmp_path,
            )
            assert out.strip(), text
            ran += 1
            continue
        for command, expected in commands(text):
            if command in SET_UP:
                continue
            out = run(command, service, tmp_path)
            if expected:
                assert out.strip() == expected, command
            ran += 1
    assert ran >= 8


def test_operating_a_bookie_works_as_it_is_written(service: Service, tmp_path: Path) -> None:
    """After the first two commands of the tour, on the service's data, with numbers and widths left out."""
    run("printf 'first\\nsecond\\n' | magnetar produce orders", service, tmp_path)
    run("magnetar consume orders -s billing --start earliest -n 2", service, tmp_path)
    service.stop()
    _, operating = README.read_text().split(OPERATING)
    operated = 0
    for language, text in blocks(operating):
        assert language == "console"
        for command, expected in commands(text):
            out = shape(run(command, service, tmp_path))
            for line in shape(expected):
                assert line == "..." or line in out, f"{command}: {line}\n" + "\n".join(out)
            operated += 1
    assert operated >= 12
