"""Revisions out of git, and environments that are found again by what is installed in them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.compare import revisions
from bench.compare.errors import CompareFailed
from bench.compare.revisions import KEPT, Environment, Environments, Repository, Revision, differing_packages


class Checkout:
    """A small repository that has the folders of a product."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "--quiet", "--initial-branch=main")
        self.write("pyproject.toml", "[project]\n")
        self.write("proto/magnetar/proto/a.py", "ONE = 1\n")
        self.write("bench/run.py", "run\n")
        self.write(".gitignore", "*.log\n/build/\n")
        self.commit("first")

    def git(self, *arguments: str) -> str:
        identity = (
            "-c",
            "user.name=somebody",
            "-c",
            "user.email=somebody@example.org",
            "-c",
            "commit.gpgsign=false",
        )
        command = ["git", "-C", str(self.root), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "checkout"
    root.mkdir()
    return Checkout(root)


@pytest.fixture
def repository(checkout: Checkout) -> Repository:
    return Repository(checkout.root / "bench")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Instead of pip: the labels of what was installed."""
    labels: list[str] = []

    def install(self: Environments, revision: Revision, path: Path, python: Path) -> None:
        labels.append(revision.label)
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)

    monkeypatch.setattr(Environments, "_install", install)
    return labels


@pytest.mark.real
def test_the_root_is_found_from_within(checkout: Checkout, repository: Repository) -> None:
    assert repository.root == checkout.root


@pytest.mark.real
def test_revisions_are_named_as_git_knows_them(checkout: Checkout, repository: Repository) -> None:
    short = checkout.git("rev-parse", "--short", "HEAD")
    assert repository.revision("main").label == f"main ({short})"
    assert repository.revision(short).label == short
    assert repository.revision("main").tree == checkout.git("rev-parse", "HEAD^{tree}")
    for wrong in ("nothing-of-this-name", "--all", ""):
        with pytest.raises(CompareFailed, match=r"git knows no commit .*; give a branch"):
            repository.revision(wrong)


@pytest.mark.real
def test_outside_of_a_repository_there_is_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(CompareFailed, match="not a git repository"):
        Repository(tmp_path)


@pytest.mark.real
def test_without_git_the_error_names_it(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CompareFailed, match="git is not installed"):
        Repository(checkout.root)


@pytest.mark.real
def test_a_clean_working_tree_is_the_commit(checkout: Checkout, repository: Repository) -> None:
    ours = repository.working_tree()
    assert ours.tree == repository.revision("HEAD").tree
    assert ours.label == f"working tree ({checkout.git('rev-parse', '--short', 'HEAD')})"


@pytest.mark.real
def test_the_working_tree_has_changed_new_and_deleted_files(
    checkout: Checkout, repository: Repository, tmp_path: Path
) -> None:
    checkout.write("proto/magnetar/proto/a.py", "ONE = 2\n")
    checkout.write("proto/magnetar/proto/new.py", "new\n")
    checkout.write("proto/magnetar/proto/noise.log", "ignored\n")
    (checkout.root / "bench" / "run.py").unlink()
    checkout.write("bench/other.py", "other\n")
    before = checkout.git("status", "--porcelain")
    ours = repository.working_tree()
    repository.export(ours, ("proto", "bench", "absent"), tmp_path / "export")
    assert checkout.git("status", "--porcelain") == before, "the index of the user is not touched"
    assert ours.label.endswith("and changes)")
    files = {str(path.relative_to(tmp_path / "export")) for path in tmp_path.glob("export/**/*.*")}
    assert files == {"proto/magnetar/proto/a.py", "proto/magnetar/proto/new.py", "bench/other.py"}
    assert (tmp_path / "export/proto/magnetar/proto/a.py").read_text() == "ONE = 2\n"
    assert checkout.git("worktree", "list").count("\n") == 0


@pytest.mark.real
def test_an_export_of_nothing_says_so(repository: Repository, tmp_path: Path) -> None:
    with pytest.raises(CompareFailed, match="has none of spark"):
        repository.export(repository.revision("HEAD"), ("spark",), tmp_path)


@pytest.mark.real
def test_a_revision_is_installed_once(
    repository: Repository, checkout: Checkout, tmp_path: Path, installed: list[str]
) -> None:
    environments = Environments(tmp_path / "compare", repository)
    head = repository.revision("HEAD")
    assert not environments.is_ready(head)
    first = environments.open(head)
    assert environments.is_ready(head)
    assert environments.open(head) == Environments(tmp_path / "compare", repository).open(head) == first
    assert "pytest" in first.packages
    # The same files in another commit, and changes of what is not installed.
    checkout.git("commit", "--quiet", "--amend", "--message", "again")
    checkout.write("bench/run.py", "another benchmark\n")
    checkout.write("tests/test_a.py", "assert True\n")
    checkout.commit("only tests and benchmarks")
    environments.open(repository.revision("HEAD"))
    environments.open(repository.working_tree())
    assert installed == [head.label]
    checkout.write("proto/magnetar/proto/a.py", "ONE = 2\n")
    assert environments.open(repository.working_tree()).python != first.python
    assert len(installed) == 2


@pytest.mark.real
def test_an_installation_that_failed_or_was_interrupted_is_done_again(
    repository: Repository, tmp_path: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = Environments(tmp_path / "compare", repository)
    head = repository.revision("HEAD")
    work = Environments._install

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Environments, "_install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        environments.open(head)
    assert not environments.path(head).exists()
    # Killed: there was no time to clean up.
    environments.path(head).mkdir(parents=True)
    (environments.path(head) / "half").touch()
    monkeypatch.setattr(Environments, "_install", work)
    environments.open(head)
    assert installed == [head.label]
    assert not (environments.path(head) / "half").exists()


@pytest.mark.real
@pytest.mark.slow
def test_what_pip_says_is_in_the_error(checkout: Checkout, repository: Repository, tmp_path: Path) -> None:
    checkout.write("pyproject.toml", "[project\n")
    environments, ours = Environments(tmp_path / "compare", repository), repository.working_tree()
    with pytest.raises(CompareFailed, match=r"cannot install working tree .*\n(.|\n)*pyproject.toml"):
        environments.open(ours)
    assert not environments.path(ours).exists()


@pytest.mark.real
def test_environments_used_least_recently_go_first(repository: Repository, tmp_path: Path) -> None:
    folder = tmp_path / "compare"
    for number in range(KEPT + 3):
        path = folder / f"env-{number}"
        path.mkdir(parents=True)
        if number != 7:
            (path / revisions._READY).write_text("{}")
            os.utime(path / revisions._READY, (1000 + number, 1000 + number))
    (folder / "run-1").mkdir()
    Environments(folder, repository).forget_old()
    left = {path.name for path in folder.iterdir()}
    assert left == {"run-1", *(f"env-{number}" for number in (8, 6, 5, 4, 3, 2))}


@pytest.mark.real
def test_an_environment_in_use_is_none_of_the_oldest(
    repository: Repository, tmp_path: Path, installed: list[str]
) -> None:
    environments, head = Environments(tmp_path / "compare", repository), repository.revision("HEAD")
    environments.open(head)
    ready = environments.path(head) / revisions._READY
    os.utime(ready, (1000, 1000))
    environments.open(head)
    assert ready.stat().st_mtime > 1000


def test_packages_that_differ_are_named() -> None:
    base = Environment(Path("a"), {"msgpack": "1.2.4", "lz4": "4.4", "old": "1"})
    ours = Environment(Path("b"), {"msgpack": "1.2.5", "lz4": "4.4", "new": "2"})
    assert differing_packages(base, ours) == ["msgpack 1.2.4 -> 1.2.5", "new absent -> 2", "old 1 -> absent"]
