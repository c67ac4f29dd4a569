"""Names the test modules near a change: those that were changed, and those that import what was changed or its importers.

    python -m support.near main      # since the revision `main`, with what is not committed

Only direct importers count, since through `__init__` modules nearly everything is imported by everything. One path a line.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

__all__ = ["changed_since", "imports_of", "main", "near"]

ROOTS = ("proto/", "bookie/", "broker/", "client/", "tests/")


def changed_since(revision: str) -> list[str]:
    """Python files that differ from the revision, or that git does not know yet."""
    differ = ["git", "diff", "--name-only", "--diff-filter=d", revision, "--", "*.py"]
    unknown = ["git", "ls-files", "--others", "--exclude-standard", "--", "*.py"]
    return sorted(
        {
            line
            for command in (differ, unknown)
            for line in subprocess.check_output(command, text=True).split()
        }
    )


def module_name(path: str) -> str:
    """The name that a file is imported by; its own path for a file outside of all roots."""
    root = next((root for root in ROOTS if path.startswith(root)), "")
    return path.removeprefix(root).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(text: str) -> set[str]:
    """Names of modules that a module imports; `from a import b` counts as a, and as a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{name.name}" for name in node.names)
    return found


def near(changed: list[str], texts: dict[str, str]) -> list[str]:
    """Paths of the test modules, among all files by path, that were changed or import what was, or one of its importers."""
    imports = {path: imports_of(text) for path, text in texts.items()}
    names = {module_name(path) for path in changed}
    names |= {
        module_name(path)
        for path, found in imports.items()
        if found & names and not path.startswith("tests/")
    }
    return [
        path
        for path, found in sorted(imports.items())
        if path.startswith("tests/")
        and Path(path).name.startswith("test_")
        and (path in changed or found & names)
    ]


def main() -> int:
    """Prints them."""
    files = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *ROOTS], text=True
    ).split()
    texts = {
        path: Path(path).read_text(encoding="utf-8")
        for path in files
        if path.endswith(".py") and Path(path).exists()
    }
    print("\n".join(near(changed_since(sys.argv[1]), texts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
