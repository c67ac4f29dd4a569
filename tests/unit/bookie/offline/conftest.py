"""Images are made once; each test damages a copy of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.offline_kit import make_images


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(stopped, killed)."""
    return make_images(tmp_path_factory.mktemp("offline"))


@pytest.fixture
def stopped(images: tuple[Path, Path], tmp_path: Path) -> Path:
    """A bookie that was stopped as it should be."""
    return Path(shutil.copytree(images[0], tmp_path / "stopped"))


@pytest.fixture
def killed(images: tuple[Path, Path], tmp_path: Path) -> Path:
    """One that was killed: its journals hold what the entry logs have not."""
    return Path(shutil.copytree(images[1], tmp_path / "killed"))
