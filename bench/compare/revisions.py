"""The two sides of a comparison: revisions as git has them, each installed into a virtual environment of its own.

The working tree is a revision like any other: git writes it down as a tree, changes that are not committed and new files
included, by way of an index of our own. So nothing that is edited during a run gets into it. Both sides are installed in the
same way, as users do it, from an export of their tree; no worktree is registered with git, and none is left behind.

    build/compare/env-<digest>/     an environment; the digest is that of what was installed and of the Python
    build/compare/run-<time>/       the benchmarks' code and data of a run that goes on; removed with it

An environment is found again by its digest, so a revision is installed once, also when only its tests or benchmarks changed.
The KEPT ones used last stay (130 MB each); `make clean` removes all.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from bench.compare.errors import CompareFailed

# What is in the distribution, or makes it.
INSTALLED = ("pyproject.toml", "README.md", "LICENSE", "proto", "bookie", "broker", "client")
BENCH = ("bench", "tests/support")  # the second is a kit that the benchmarks share with the tests
KEPT = 6
_READY = "ready.json"


class Revision(NamedTuple):
    """`label` for people; `tree` of git."""

    label: str
    tree: str


class Environment(NamedTuple):
    """`python` has the product of a revision installed, with `packages`: what else, by name."""

    python: Path
    packages: dict[str, str]


class Repository:
    """The git repository around this file."""

    def __init__(self, start: Path) -> None:
        """Raises CompareFailed when there is none."""
        self.root = start
        self.root = Path(self._git("rev-parse", "--show-toplevel"))

    def revision(self, name: str) -> Revision:
        """A commit by any name that git knows it by. Raises CompareFailed."""
        try:
            commit = self._git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        except CompareFailed:
            raise CompareFailed(
                f"git knows no commit {name!r}; give a branch, a tag or a commit id"
            ) from None
        short = self._git("rev-parse", "--short", commit)
        label = short if commit.startswith(name) else f"{name} ({short})"
        return Revision(label, self._git("rev-parse", f"{commit}^{{tree}}"))

    def working_tree(self) -> Revision:
        """What can be installed or measured with, as it is now."""
        with tempfile.TemporaryDirectory() as scratch:
            index = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
            self._git("read-tree", "HEAD", environment=index)
            present = [name for name in (*INSTALLED, *BENCH) if (self.root / name).exists()]
            self._git("add", "--all", "--", *present, environment=index)
            tree = self._git("write-tree", environment=index)
        changed = tree != self._git("rev-parse", "HEAD^{tree}")
        short = self._git("rev-parse", "--short", "HEAD")
        return Revision(f"working tree ({short}{' and changes' if changed else ''})", tree)

    def product(self, revision: Revision) -> str:
        """A digest of what is installed: equal for revisions that differ in tests, pages or benchmarks only."""
        listing = self._git("ls-tree", revision.tree, "--", *INSTALLED)
        return hashlib.sha256(listing.encode()).hexdigest()[:12]

    def export(self, revision: Revision, names: tuple[str, ...], target: Path) -> None:
        """Writes these files and folders of the revision below `target`; those that it lacks are left out."""
        present = self._git("ls-tree", "--name-only", revision.tree, "--", *names).split()
        if not present:
            raise CompareFailed(f"{revision.label} has none of {', '.join(names)}")
        with tempfile.TemporaryFile() as archive:
            command = ["git", "-C", str(self.root), "archive", "--format=tar", revision.tree, "--", *present]
            subprocess.run(command, stdout=archive, check=True)
            archive.seek(0)
            with tarfile.open(fileobj=archive) as tar:
                tar.extractall(target, filter="data")

    def _git(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", str(self.root), *arguments],
                env=os.environ | (environment or {}),
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError:
            raise CompareFailed("git is not installed; a comparison takes both sides from git") from None
        if done.returncode:
            said = done.stderr.strip() or f"git {arguments[0]} ended with {done.returncode}"
            raise CompareFailed(said)
        return done.stdout.strip()


class Environments:
    """The environments below a folder."""

    def __init__(self, folder: Path, repository: Repository) -> None:
        self.folder = folder
        self.repository = repository

    def path(self, revision: Revision) -> Path:
        """Where the environment of the revision is, or will be."""
        python = f"{sys.implementation.cache_tag}-{sys.version}"
        digest = hashlib.sha256(f"{self.repository.product(revision)} {python}".encode()).hexdigest()[:12]
        return self.folder / f"env-{digest}"

    def is_ready(self, revision: Revision) -> bool:
        """True if nothing has to be installed."""
        return (self.path(revision) / _READY).exists()

    def open(self, revision: Revision) -> Environment:
        """Installs the revision if it is not yet. Raises CompareFailed with what pip said."""
        path = self.path(revision)
        ready, python = path / _READY, path / "bin" / "python"
        if not ready.exists():
            shutil.rmtree(path, ignore_errors=True)  # of an installation that was interrupted
            path.mkdir(parents=True)
            try:
                self._install(revision, path, python)
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
            # Last: an environment is complete, or it is none.
            ready.write_text(json.dumps(_packages(python)))
        ready.touch()
        return Environment(python, json.loads(ready.read_text()))

    def _install(self, revision: Revision, path: Path, python: Path) -> None:
        source = path / "source"
        self.repository.export(revision, INSTALLED, source)
        venv = [sys.executable, "-m", "venv", "--without-pip", str(path)]
        _run(venv, f"create an environment for {revision.label}")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
        _run([*pip, "install", f"{source}[server]"], f"install {revision.label}")
        shutil.rmtree(source)

    def forget_old(self) -> None:
        """Removes what was used least recently, and what was never completed."""
        found = sorted(self.folder.glob("env-*"), key=_last_use, reverse=True)
        for place, path in enumerate(found):
            if place >= KEPT or not (path / _READY).exists():
                shutil.rmtree(path, ignore_errors=True)


def differing_packages(base: Environment, ours: Environment) -> list[str]:
    """What pip resolved differently for the two: "msgpack 1.2.4 -> 1.2.5"."""
    return [
        f"{name} {base.packages.get(name, 'absent')} -> {ours.packages.get(name, 'absent')}"
        for name in sorted(base.packages.keys() | ours.packages.keys())
        if base.packages.get(name) != ours.packages.get(name)
    ]


def _last_use(environment: Path) -> float:
    try:
        return (environment / _READY).stat().st_mtime
    except OSError:
        return 0.0


def _packages(python: Path) -> dict[str, str]:
    """Installed distributions by name, but for the product and what installed it."""
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
    )
    done = subprocess.run([str(python), "-I", "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return {name: found[name] for name in found if name not in ("magnetar", "pip", "setuptools")}


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise CompareFailed(f"cannot {what}:\n{done.stdout.strip()}")
