"""A copy of a data directory while its owner runs: what a kill -9 at this moment would have left."""

from __future__ import annotations

import shutil
from pathlib import Path

_TRIES = 100


def copy_running(source: Path, target: Path, *ignored: str) -> Path:
    """Without the names `ignored` (patterns). Taken anew when files came or went meanwhile: it would be of no one moment."""
    for _ in range(_TRIES):
        before = _names(source)
        try:
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(*ignored))
            if _names(source) == before:
                return target
        except shutil.Error:  # a file that was listed is gone
            pass
        shutil.rmtree(target)
    raise AssertionError(f"{source} did not stand still in {_TRIES} copies")


def _names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
