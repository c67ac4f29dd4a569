"""Which files are production code, and how a finding and an exception to a rule are written.

Invariant: paths are relative to the repository and use forward slashes, so that an allow table reads the
same everywhere.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PRODUCTION_ROOTS = ("proto", "bookie", "broker", "client")


@dataclass(frozen=True, slots=True)
class Source:
    """One parsed file."""

    path: str
    text: str
    tree: ast.Module


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A broken rule at a place; printed as an editor expects it."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.message}"


@dataclass(frozen=True, slots=True)
class Allow:
    """An exception: files matching `pattern` may break `rules`, because of `reason`."""

    pattern: str  # as in fnmatch, where * also matches a slash: "client/magnetar/cli/*"
    rules: frozenset[str]
    reason: str

    def covers(self, path: str, rule: str) -> bool:
        """Whether this line excuses that rule in that file."""
        return rule in self.rules and fnmatchcase(path, self.pattern)


def parse(text: str, path: str) -> Source:
    """Parse one file's text; a syntax error names the file."""
    return Source(path, text, ast.parse(text, filename=path))


def production_sources(repository: Path = REPOSITORY) -> Iterator[Source]:
    """Every Python file of the four source roots, in a fixed order."""
    for root in PRODUCTION_ROOTS:
        for file in sorted((repository / root).rglob("*.py")):
            path = file.relative_to(repository).as_posix()
            yield parse(file.read_text(encoding="utf-8"), path)


def without_allowed(findings: Iterable[Finding], allowed: Iterable[Allow]) -> list[Finding]:
    """The findings that no line of the allow table covers, in order."""
    table = tuple(allowed)
    return sorted(f for f in findings if not any(line.covers(f.path, f.rule) for line in table))
