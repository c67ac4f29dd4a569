"""docs/spark-packaging.md: its commands as they stand, on workers whose Python has nothing installed.

`local-cluster[1,1,1024]` starts a worker and an executor as processes of their own. A `pip` before the real one installs
from this environment and the work tree, not from the network.

Each way is three Java machines and 27 s of CPU time: `make test` goes the first, `make spark` all of them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.long_form import long_form
from support.service import Service
from support.spark_programs import Program, spark_environment
from support.spark_topics import Sent, Topics

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300, func_only=True)]

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "spark-packaging.md"
BIN = Path(sys.executable).parent
MASTER = "spark://master.example:7077"
URL = "magnetar://broker.example:7650"

PIP = '''#!{python}
"""pip install [--no-deps] --target DIR magnetar ..., or pip --python ENV install ...: from an installed environment."""
import importlib.metadata as metadata, os, re, shutil, sys
from pathlib import Path

arguments = sys.argv[1:]
target = None
if arguments[0] == "--python":
    target = next((Path(arguments[1]) / "lib").glob("python*")) / "site-packages"
    del arguments[:2]
assert arguments.pop(0) == "install", sys.argv
alone = "--no-deps" in arguments
if alone:
    arguments.remove("--no-deps")
if arguments[0] == "--target":
    target = Path(arguments[1])
    del arguments[:2]

def place(source, below):
    if source.is_file() and "__pycache__" not in below.parts and ".." not in below.parts:
        (target / below).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / below)

def install(name):
    if name == "magnetar":
        for root in ("proto", "bookie", "broker", "client"):
            for source in (Path({repository!r}) / root).rglob("*.py"):
                place(source, source.relative_to(Path({repository!r}) / root))
    else:
        for file in metadata.distribution(name).files:
            # The large parts of pyarrow that no task uses: they would be packed and unpacked three times a test.
            if not re.search("/(include|tests|src)/|_(flight|s3)", str(file)):
                place(Path(file.locate()), Path(str(file)))
    if not alone:
        for wanted in metadata.requires(name) or []:
            if "extra ==" not in wanted:
                install(re.match(r"[\\w-]+", wanted)[0])

for name in arguments:
    install(name)
'''


# The driver's Python is not there on a worker, whose programs run below its folder `work`.
DRIVER_PYTHON = """#!/bin/sh
case "$PWD" in */work/app-*) echo "this is the driver's Python, on a worker" >&2; exit 1;; esac
exec '{python}' "$@"
"""


def section(title: str) -> str:
    """The text below a heading."""
    _, _, rest = PAGE.read_text().partition(f"# {title}\n")
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in for pip, and with the driver's Python."""
    folder = tmp_path_factory.mktemp("bin")
    for name, text in (("pip", PIP), ("python", DRIVER_PYTHON)):
        (folder / name).write_text(text.format(python=sys.executable, repository=str(REPOSITORY)))
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def spark_home(tmp_path: Path) -> Path:
    """Spark's own folder by links, for workers keep their files below it."""
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    home = tmp_path / "spark"
    home.mkdir()
    for name in ("bin", "jars", "python"):
        (home / name).symlink_to(Path(spec.origin).parent / name)
    return home


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """A Python with nothing installed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "worker"], check=True)
    return tmp_path / "worker"


@pytest.fixture
def submit(
    service: Service, topics: Topics, tmp_path: Path, programs: Path, spark_home: Path
) -> Callable[..., None]:
    """Runs the commands of a section in a folder that has `job.py`, and looks at what the job wrote."""

    def run(title: str, topic: str, *replaced: tuple[str, str]) -> None:
        topics.produce(topic, [Sent(b"", key) for key in ("a", "b", "a", "c")])
        (job,) = blocks("python", section("A cluster: register by hand"))
        job = job.replace(URL, service.url).replace('"orders"', f'"{topic}"')
        # Says where tasks run, for the test to see that it was a worker.
        job = job.replace('"counts"', f'"{topic}-counts"') + WHERE
        (tmp_path / "job.py").write_text(job)
        commands = re.findall(r"^\$ (.+)", "".join(blocks("console", section(title))), re.MULTILINE)
        text = " && ".join(commands)
        for old, new in ((MASTER, "'local-cluster[1,1,1024]'"), *replaced):
            assert old in text, old
            text = text.replace(old, new)
        environment = spark_environment(tmp_path, [programs, BIN], SPARK_HOME=str(spark_home), GZIP="-1")
        said = Program(text, tmp_path, environment).result(280)
        assert "worker's magnetar:" in said
        place = next(line for line in said.splitlines() if line.startswith("worker's magnetar:"))
        assert str(REPOSITORY) not in place
        counts = {row.key: row.value for row in topics.rows(f"{topic}-counts")}
        assert counts == {b"a": b"2", b"b": b"1", b"c": b"1"}

    return run


WHERE = """

def where(rows):
    import magnetar.spark
    yield magnetar.spark.__file__

print("worker's magnetar:", spark.sparkContext.parallelize([1], 1).mapPartitions(where).first())
"""


@pytest.mark.spark
@pytest.mark.real
def test_an_environment_as_an_archive(submit: Callable[..., None]) -> None:
    submit("An environment as an archive", "env-orders")


@pytest.mark.spark
@pytest.mark.real
@long_form
def test_packages_as_an_archive(submit: Callable[..., None], worker: Path) -> None:
    submit("Packages as an archive", "deps-orders", ("/usr/bin/python3", str(worker / "bin" / "python")))


@pytest.mark.spark
@pytest.mark.real
@long_form
def test_py_files(submit: Callable[..., None], worker: Path, programs: Path) -> None:
    names = "msgpack msgspec xxhash mmh3 lz4 zstandard cramjam uvloop pyarrow"
    assert names in section("`--py-files`")
    packages = next((worker / "lib").glob("python*")) / "site-packages"
    subprocess.run([programs / "pip", "install", "--target", packages, *names.split()], check=True)
    submit("`--py-files`", "zip-orders", ("/opt/worker/bin/python", str(worker / "bin" / "python")))


def test_the_page_names_what_is_needed() -> None:
    needed = {
        match[0]
        for wanted in importlib.metadata.requires("magnetar") or []
        if "extra ==" not in wanted and (match := re.match(r"[\w-]+", wanted))
    }
    named = re.search(r"workers that have `([^`]+)`", section("`--py-files`"))
    assert named is not None
    assert set(named[1].split()) == needed | {"pyarrow"}
