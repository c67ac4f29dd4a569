"""ZooKeeper servers for a benchmark, of the kind that the tests use."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.arguments import OUT


@contextlib.contextmanager
def ensemble_in_scratch(servers: int) -> Iterator[tuple[Any, Path]]:
    """A `support.zookeeper.Ensemble` that was started, and the directory with its files; both are gone in the end.

    Ends the program, and says why, where ZooKeeper cannot run.
    """
    from support.zookeeper import Ensemble, ZooKeeperMissing

    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as text:
        directory = Path(text)
        try:
            ensemble = Ensemble(directory / "zookeeper", servers)
        except ZooKeeperMissing as missing:
            raise SystemExit(f"bench: {missing}") from None
        with ensemble:
            ensemble.start()
            yield ensemble, directory
