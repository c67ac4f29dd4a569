"""The README and the pages of docs/ that it leads to, run as they stand: what they print is what they show.

Console blocks run in a shell and Python blocks in a Python of their own, all in one folder, against real daemons. The first
block of the README installs Magnetar into a new virtual environment, and the rest of the README runs there. Its Spark block
and the Spark pages are run by the tests in spark_shells.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pulsar_admin.distribution import Missing, distribution
from support.forked_commands import run_magnetar, spawn
from support.pages import blocks_of, same

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
PORT = re.compile(r"\b(6650|7650|7651|3181|3182|3183|3184|8080|8081|8001|8002|8003)\b")
NUMBER = re.compile(r"\d[\d,]*")
GO_CLIENT = "github.com/apache/pulsar-client-go/pulsar@v0.14.0"
SOURCES = ("proto", "bookie", "broker", "client", "pyproject.toml", "README.md", "LICENSE")


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(command, what it prints) of a console block."""
    for block in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = block.partition("\n")
        yield command, expected.strip()


def shape(text: str) -> list[str]:
    """Lines without their numbers and their widths."""
    lines = [" ".join(NUMBER.sub("N", line).split()) for line in text.splitlines()]
    return [re.sub("─+", "─", line) for line in lines if line]


class Terminals:
    """What somebody has open who follows a page: a folder, an environment, daemons. The page's ports become free ones."""

    def __init__(self, folder: Path) -> None:
        """The working directory of this process is that folder, for commands that are forked."""
        self.folder = folder
        self.ran = 0
        self._ports: dict[str, str] = {}
        self._daemons: list[Any] = []
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(folder),
            **{name: value for name, value in os.environ.items() if name.startswith("PYTHON")},
            "MAGNETAR_URL": f"magnetar://127.0.0.1:{self.port('7650')}",
            "MAGNETAR_DAEMON_PORT": self.port("7650"),
            "MAGNETAR_DAEMON_BOOKIE_PORT": self.port("3181"),
            "MAGNETAR_DAEMON_HTTP_PORT": self.port("8080"),
        }

    def port(self, written: str) -> str:
        """The free one that stands for it."""
        while written not in self._ports:
            # Below those that the kernel hands out to whoever asks for any: nobody gets it between now and its use.
            port = random.randrange(20_000, 32_000)
            with socket.socket() as probe:
                if str(port) not in self._ports.values() and probe.connect_ex(("127.0.0.1", port)) != 0:
                    self._ports[written] = str(port)
        return self._ports[written]

    def follow(self, page: Path, *, by_shape: bool = False) -> None:
        """Runs every block. `by_shape`: what is shown is part of what is printed, numbers and widths left out."""
        for language, text, output, _ in blocks_of(page.read_text()):
            if language == "python":
                out = self.run(
                    [shutil.which("python", path=self.environment["PATH"]) or "", "-c", self.freed(text)]
                )
                assert out.strip() if output is None else same(output, out), f"{text}\n{out}"
                continue
            for command, expected in commands(text):
                out = self.type(command)
                if by_shape:
                    for line in shape(expected):
                        assert line == "..." or line in shape(out), f"{command}: {line}\n{out}"
                elif expected:
                    assert out.strip() == expected, command

    def type(self, command: str) -> str:
        """What a command prints. Daemons go on running, in terminals of their own."""
        command = self.freed(command)
        if command.endswith(" &") or command == "magnetar standalone":
            self._start(command.removesuffix(" &"))
            return ""
        if command.startswith(". "):
            binaries = (self.folder / command[2:]).parent
            self.environment["PATH"] = f"{binaries}:{self.environment['PATH']}"
            return ""
        if command.startswith("curl ") and shutil.which("curl") is None:
            return ""
        # Not from the network: everything that is needed stands in the environment of the tests.
        return self.run(command.replace("pip install", "pip install --no-index --no-build-isolation"))

    def run(self, arguments: list[str] | str) -> str:
        done: subprocess.CompletedProcess[str]
        if isinstance(arguments, str) and (words := self._forkable(arguments)):
            done = run_magnetar(*words, environment=self.environment, timeout=100)
        else:
            done = subprocess.run(
                arguments,
                shell=isinstance(arguments, str),
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        self.ran += 1
        return done.stdout

    def _forkable(self, command: str) -> list[str]:
        """The arguments of a plain `magnetar` of this environment; none of what needs a shell, or another environment."""
        binary = shutil.which("magnetar", path=self.environment["PATH"])
        ours = binary is not None and Path(binary).parent == Path(sys.executable).parent
        words = shlex.split(command)
        return words[1:] if ours and words[0] == "magnetar" and not set(command) & set("|>$;&\n") else []

    def freed(self, text: str) -> str:
        """With the free ports."""
        return PORT.sub(lambda found: self.port(found[0]), text)

    def _start(self, command: str) -> None:
        errors = self.folder / f"daemon-{len(self._daemons)}.log"
        with errors.open("wb") as log:
            words = self._forkable(command)
            line = [sys.executable, "-m", "magnetar.cli.main", *words] if words else shlex.split(command)
            daemon = spawn(
                line,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment,
            )
        self._daemons.append(daemon)
        ready = daemon.stdout.readline().decode()
        assert " is ready: " in ready, f"{command}\n{ready}{errors.read_text()}"
        self.ran += 1

    def close(self) -> None:
        """Ctrl-C in each: the last one that was started first."""
        daemons, self._daemons = self._daemons, []
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=30)
            daemon.stdout.close()
        assert [daemon.returncode for daemon in daemons] == [0] * len(daemons)


@pytest.fixture
def terminals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminals]:
    monkeypatch.chdir(tmp_path)
    opened = Terminals(tmp_path)
    yield opened
    opened.close()


@pytest.mark.real
def test_the_readme_works_as_it_is_written(terminals: Terminals) -> None:
    for name in SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, terminals.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, terminals.folder / name)
    # Packages that Magnetar needs are found here, as if they had been downloaded; Magnetar itself is not there.
    terminals.environment["PYTHONPATH"] = sysconfig.get_path("purelib")
    terminals.follow(README)
    assert terminals.ran >= 9
    found = terminals.run(["sh", "-c", "cd / && python -c 'import magnetar.client as c; print(c.__file__)'"])
    assert found.startswith(str(terminals.folder / ".venv"))


@pytest.mark.real
@pytest.mark.parametrize(
    ("page", "least"), [("operations.md", 26), ("ledgers.md", 4), ("web.md", 4), ("tenants.md", 9)]
)
def test_a_page_works_as_it_is_written(terminals: Terminals, page: str, least: int) -> None:
    terminals.follow(DOCS / page)
    assert terminals.ran >= least


@pytest.mark.real
def test_the_client_page_works_as_it_is_written(terminals: Terminals) -> None:
    terminals.type("magnetar standalone")
    terminals.follow(DOCS / "client.md")
    assert terminals.ran >= 10


@pytest.mark.real
def test_the_page_of_delayed_delivery_works_as_it_is_written(terminals: Terminals) -> None:
    terminals.type("magnetar standalone")
    terminals.follow(DOCS / "delayed-delivery.md")
    assert terminals.ran >= 3


@pytest.mark.real
def test_the_page_of_access_modes_works_as_it_is_written(terminals: Terminals) -> None:
    terminals.type("magnetar standalone")
    terminals.follow(DOCS / "access-modes.md")
    assert terminals.ran >= 3


@pytest.mark.real
def test_the_page_of_large_messages_works_as_it_is_written(terminals: Terminals) -> None:
    terminals.type("magnetar standalone")
    terminals.follow(DOCS / "large-messages.md")
    assert terminals.ran >= 2


@pytest.mark.real
def test_the_page_of_partitions_works_as_it_is_written(terminals: Terminals) -> None:
    terminals.type("magnetar standalone")
    terminals.follow(DOCS / "partitions.md")
    assert terminals.ran >= 10


@pytest.mark.real
def test_the_page_of_deduplication_works_as_it_is_written(terminals: Terminals) -> None:
    terminals.type("magnetar standalone")
    terminals.type("magnetar produce orders --message hello")
    terminals.follow(DOCS / "deduplication.md")
    assert terminals.ran >= 10


@pytest.mark.real
def test_the_page_of_rates_and_quotas_works_as_it_is_written(terminals: Terminals) -> None:
    terminals.type("magnetar standalone")
    terminals.follow(DOCS / "quotas.md", by_shape=True)


def pulsar_page(terminals: Terminals) -> Path:
    """A service that Pulsar's clients find at the free port that stands for 6650."""
    terminals.environment["MAGNETAR_BROKER_PULSAR_PORT"] = terminals.port("6650")
    terminals.type("magnetar standalone")
    return DOCS / "coming-from-pulsar.md"


@pytest.mark.real
def test_the_page_of_pulsars_clients_works_as_it_is_written(terminals: Terminals) -> None:
    pytest.importorskip("pulsar", reason="there is no pulsar-client for this Python")
    terminals.follow(pulsar_page(terminals))
    assert terminals.ran >= 5


@pytest.mark.real
@pytest.mark.parametrize("language", ["java", "go"])
def test_its_programs_in_other_languages_print_what_it_shows(terminals: Terminals, language: str) -> None:
    folder = os.environ.get("PULSAR_DISTRIBUTION")
    if not folder:
        pytest.skip("`make test-pulsar` compiles and runs it")
    found = re.search(
        rf"^```{language}\n(.*?)^```\n\n```text\n(.*?)^```\n",
        pulsar_page(terminals).read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert found is not None
    (terminals.folder / f"Payments.{language}").write_text(terminals.freed(found[1]))
    if language == "go":
        if not shutil.which("go"):
            pytest.skip("there is no `go` here")
        commands = ["go mod init payments", f"go get {GO_CLIENT}", "go run ."]
    else:
        try:
            commands = [f"java -cp '{distribution(REPOSITORY / folder)}/lib/*' Payments.java"]
        except Missing as error:
            pytest.skip(str(error))
    # With the caches and registries of whoever runs this.
    terminals.environment = {
        **os.environ,
        **terminals.environment,
        "PATH": os.environ["PATH"],
        "HOME": str(Path.home()),
    }
    assert found[2] in "".join(map(terminals.run, commands))


@pytest.mark.real
def test_the_durability_page_works_as_it_is_written(terminals: Terminals) -> None:
    terminals.type("magnetar standalone")
    terminals.type("magnetar produce orders --message hello")
    terminals.follow(DOCS / "durability.md")
    assert terminals.ran >= 5


@pytest.mark.real
def test_the_page_of_policies_works_as_it_is_written(terminals: Terminals) -> None:
    terminals.type("magnetar standalone")
    terminals.follow(DOCS / "policies.md", by_shape=True)
    assert terminals.ran >= 7


@pytest.mark.real
def test_looking_after_a_stopped_bookie_works_as_it_is_written(terminals: Terminals) -> None:
    """After the README's first two commands, on the data of that service."""
    terminals.type("magnetar standalone")
    terminals.type("printf 'first\\nsecond\\n' | magnetar produce orders")
    terminals.type("magnetar consume orders --subscription billing --start earliest --count 2")
    terminals.close()
    terminals.follow(DOCS / "bookie-operations.md", by_shape=True)
    assert terminals.ran >= 15


def test_every_page_with_commands_is_followed_by_a_test() -> None:
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert [
        page.name
        for page in DOCS.glob("*.md")
        if blocks_of(page.read_text()) and f'"{page.name}"' not in tests
    ] == []
