"""The distribution: namespace roots, what a thin install loads, what the wheel holds."""

import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = ("proto", "bookie", "broker", "client")
SERVER_LIBRARIES = ("aiohttp", "aiozk", "prometheus_client", "rich", "rocksdict", "structlog", "typer")
SERVER_ROOMS = (
    "magnetar.metadata",
    "magnetar.ledger",
    "magnetar.bookie",
    "magnetar.broker",
    "magnetar.archive",
    "magnetar.gateway",
    "magnetar.cli",
)


def pyproject() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def python(code: str, *options: str) -> str:
    """What a fresh interpreter of this environment prints."""
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY).stdout


@pytest.mark.parametrize("root", ROOTS)
def test_roots_are_pep_420_namespaces(root: str) -> None:
    assert (REPOSITORY / root / "magnetar").is_dir()
    assert not (REPOSITORY / root / "__init__.py").exists()
    assert not (REPOSITORY / root / "magnetar" / "__init__.py").exists()


def test_roots_hold_nothing_but_the_namespace() -> None:
    # A module beside it would become a top-level module of everyone who installs us.
    allowed = {"magnetar", "pyspark_magnetar", "pyspark_magnetar.py", "__pycache__"}
    for root in ROOTS:
        children = (REPOSITORY / root).iterdir()
        assert {child.name for child in children if child.suffix != ".md"} <= allowed  # a page is no module


def test_every_room_is_typed_and_watched_by_the_import_linter() -> None:
    rooms = sorted(
        f"magnetar.{marker.parent.name}"
        for root in ROOTS
        for marker in (REPOSITORY / root / "magnetar").glob("*/__init__.py")
    )
    assert sorted(pyproject()["tool"]["importlinter"]["root_packages"]) == rooms
    for root in ROOTS:
        for package in (REPOSITORY / root / "magnetar").glob("*/__init__.py"):
            assert (package.parent / "py.typed").exists()


@pytest.mark.real
def test_client_loads_no_server_library() -> None:
    loaded = set(python("import sys, magnetar.client; print(*sys.modules)").split())
    assert "magnetar.client" in loaded
    assert not loaded & {*SERVER_LIBRARIES, *SERVER_ROOMS}


CLUSTER_STATUS = """
import asyncio, contextlib, sys
import magnetar.cli.app, magnetar.metadata.zookeeper
from magnetar.cli.cluster import commands as cluster
sys.path.append("tests")
from support.memory_metadata import MemoryMetadataStore

@contextlib.asynccontextmanager
async def open_store(*_):
    yield MemoryMetadataStore()

cluster.open_store = open_store
asyncio.run(cluster.status("zk://x", 0.0, 0)).print(as_json=False)
print(*sys.modules)
"""


@pytest.mark.real
def test_the_status_of_a_cluster_loads_no_room_as_a_whole() -> None:
    """Regression: 0.7 s of CPU, and seconds on a machine in trouble, for the imports of the broker."""
    loaded = set(python(CLUSTER_STATUS).split())
    assert "magnetar.broker.ownership.cluster_view" in loaded
    assert not loaded & {"magnetar.bookie", "magnetar.broker.public", "magnetar.ledger.public"}


@pytest.mark.real
def test_command_without_the_server_extra_names_the_cure() -> None:
    # -S leaves out site-packages, as an environment without typer would; the sources are put on the path.
    roots = [str(REPOSITORY / root) for root in ROOTS]
    code = f"import sys; sys.path += {roots}\nfrom magnetar.cli.main import main\nmain()"
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("magnetar: ")
    assert line.endswith("pip install '.[server]' in Magnetar's folder  (missing: typer)")


@pytest.mark.real
def test_command_is_installed() -> None:
    command = Path(sysconfig.get_path("scripts")) / "magnetar"
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    assert version.strip() == f"magnetar {pyproject()['project']['version']}"


def test_core_dependencies_stay_few() -> None:
    names = {
        requirement.split(">")[0].split("=")[0] for requirement in pyproject()["project"]["dependencies"]
    }
    assert names == {"msgpack", "msgspec", "xxhash", "mmh3", "lz4", "zstandard", "cramjam", "uvloop"}


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_wheel_holds_the_rooms_and_nothing_else(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation"]  # hatchling is in the dev extra
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", tmp_path, REPOSITORY], check=True)
    (wheel,) = tmp_path.glob("magnetar-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    sources = [
        file.relative_to(REPOSITORY / root) for root in ROOTS for file in (REPOSITORY / root).rglob("*.py")
    ]
    assert {name for name in names if name.endswith(".py")} == {source.as_posix() for source in sources}
    assert "magnetar/client/py.typed" in names
    assert "magnetar/__init__.py" not in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} <= {"magnetar", "pyspark_magnetar"}

    # What `pip install magnetar` gives someone else: the wheel alone; its dependencies are those of this
    # environment.
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    site = str(tmp_path / "site")
    code = f"import sys; sys.path.insert(0, {site!r})\nimport magnetar.client as c; print(c.__file__)"
    assert python(code, "-P").startswith(site)
