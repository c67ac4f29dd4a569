"""Planted violations: each must be found, and each neighbour that is fine must be left alone."""

import textwrap

import pytest

from lint import determinism
from lint.sources import parse, production_sources, without_allowed

ROOM = "broker/magnetar/broker/planted.py"


def rules(text: str) -> list[str]:
    """The rules that a file with this text breaks, in the order of its lines."""
    return [f.rule for f in sorted(determinism.check(parse(textwrap.dedent(text), ROOM)))]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("import time\nnow = time.time()", "clock"),
        ("import time\nnow = time.monotonic()", "clock"),
        ("import time as t\nt.sleep(1)", "clock"),
        ("from time import monotonic as now\nprint(now())", "clock"),
        ("import time\ndef f(clock=time.monotonic): ...", "clock"),
        ("import datetime\ndatetime.datetime.utcnow()", "clock"),
        ("from datetime import datetime, UTC\ndatetime.now(UTC)", "clock"),
        ("import datetime as dt\ndt.date.today()", "clock"),
        ("import random\nrandom.random()", "chance"),
        ("import random\nrandom.shuffle(x)", "chance"),
        ("from random import choice\nchoice(x)", "chance"),
        ("import random\nr = random.Random()", "chance"),
        ("import random\nr = random.SystemRandom()", "chance"),
        ("import os\nos.urandom(8)", "chance"),
        ("from os import urandom\nurandom(8)", "chance"),
        ("import uuid\nuuid.uuid4()", "chance"),
        ("import secrets\nsecrets.token_hex()", "chance"),
        ("import threading\nthreading.Thread(target=f)", "thread"),
        ("from threading import Timer\nTimer(1, f)", "thread"),
        ("open('x')", "file"),
        ("import os\nos.open('x', 0)", "file"),
        ("import os\nos.path.exists('x')", "file"),
        ("from os import path\npath.exists('x')", "file"),
        ("import os.path\nos.path.getsize('x')", "file"),
        ("import shutil\nshutil.rmtree('x')", "file"),
        ("from pathlib import Path\nPath('x').read_text()", "file"),
        ("from pathlib import Path\ndef f(p: Path): (p / 'a').unlink()", "file"),
        ("from pathlib import Path\nclass A:\n  root: Path\n  def f(self): self.root.mkdir()", "file"),
        ("import subprocess\nsubprocess.run(['x'])", "process"),
        ("import multiprocessing\nmultiprocessing.Process()", "process"),
        ("import asyncio\nasyncio.create_subprocess_exec('x')", "process"),
        ("import os\nos.fork()", "process"),
        ("import mmap\nmmap.mmap(-1, 10)", "process"),
        ("import socket\nsocket.socket()", "network"),
        ("import urllib.request\nurllib.request.urlopen('x')", "network"),
        ("hash('x')", "hash"),
    ],
)
def test_real_thing_is_found(text: str, rule: str) -> None:
    assert rules(text) == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "for x in {1, 2}: f(x)",
        "for x in set(a): f(x)",
        "for x in frozenset(a): f(x)",
        "a: set[int] = g()\nfor x in a: f(x)",
        "def f(a: set[int]) -> None:\n  for x in a: g(x)",
        "def f(a: frozenset[int] | None) -> None:\n  for x in a: g(x)",
        "from collections.abc import Set\ndef f(a: Set[int]) -> None:\n  for x in a: g(x)",
        "from typing import Final\nA: Final[set[int]] = g()\nfor x in A: f(x)",
        "def f(a: 'set[int]'):\n  return [x for x in a]",
        "class A:\n  waiting: set[int]\n  def f(self):\n    for x in self.waiting: g(x)",
        "class A:\n  def __init__(self): self.w = set()\n  def f(self): return list(self.w)",
        "class A:\n  w: set[int]\n  def f(self):\n    for x in self.w - done: g(x)",
        "class A:\n  w: set[int]\n  def f(self):\n    w = self.w\n    for x in w: g(x)",
        "for x in a.keys() - b: f(x)",
        "for x in {1}.union(a): f(x)",
        "a = {x for x in b}\nprint(*a)",
        "a = set()\nb = [*a]",
        "a = set()\nb = tuple(a)",
        "a = set()\nx = next(iter(a))",
        "a = set()\nx = a.pop()",
        "a = set()\nx, y = a",
        "a = set()\nx = ','.join(a)",
        "a = set()\nb.extend(a)",
        "a = set()\nb = {x: 1 for x in a}",
        "a = set()\nb = dict.fromkeys(a)",
        "a = set()\nb = f(x for x in a)",
        "a = set()\nfor i, x in enumerate(a): f(i, x)",
        "def f():\n  a = set()\n  yield from a",
        "import asyncio\nasync def f():\n  done, todo = await asyncio.wait(x)\n  for t in todo: g(t)",
        "import asyncio\nfor t in asyncio.all_tasks(): t.cancel()",
    ],
)
def test_order_of_a_set_is_found(text: str) -> None:
    assert set(rules(text)) == {"set-order"}


@pytest.mark.parametrize(
    "text",
    [
        "import asyncio\nasync def f(): await asyncio.sleep(0)",
        "import time\ndef f(now): return time.gmtime(now)",
        "import datetime as d\ndef f(t: d.datetime): return d.datetime.fromtimestamp(t, d.UTC)",
        "import random\ndef f(r: random.Random) -> float: return r.random()",
        "import random\nr = random.Random(7)",
        "import uuid\nuuid.UUID(bytes=b)",
        "import threading\nlock = threading.Lock()",
        "import os\nos.environ, os.fspath(p), os.path.join(a, b), os.getpid()",
        "from pathlib import Path\ndef f(p: Path): return p / 'a', p.name, p.parent",
        "def f(files): files.open('x'); files.mkdir('y')",
        "def open(x): ...\nopen('x')",
        "def f(clock): return clock.time(), clock.monotonic()",
        "def f(time): return time.time()",
        "class A:\n  def __hash__(self): return hash((self.a, self.b))",
        "a = set()\nfor x in sorted(a): f(x)",
        "a = set()\nb = sorted(x for x in a)",
        "a = set()\nb = any(x for x in a)",
        "a = set()\nb = sum(map(f, a))",
        "a = set()\nb = {f(x) for x in a}",
        "a = set()\nb = {*a, 1}",
        "a = set()\nb = len(a), max(a), 1 in a",
        "a = set()\na.add(1); a.discard(1)",
        "a: dict[int, int] = {}\nfor x in a: f(x)",
        "a: list[int] = []\na.pop()",
        "def f():\n  a = set()\ndef g(a: list[int]):\n  for x in a: h(x)",
        "for x in a | b: f(x)",
        "class A:\n  w: set[int]\nclass B:\n  w: list[int]\n  def f(self):\n    for x in self.w: g(x)",
    ],
)
def test_what_is_fine_is_left_alone(text: str) -> None:
    assert rules(text) == []


def test_finding_says_where_and_what_to_do() -> None:
    (finding,) = determinism.check(parse("import time\n\nx = time.time()\n", ROOM))
    assert (
        str(finding) == f"{ROOM}:3: [clock] time.time: take `now` or a clock as a parameter, or loop.time()"
    )


def test_table_excuses_only_its_files_and_rules() -> None:
    text = "import time, os\ntime.time()\nos.urandom(1)\n"
    clock = list(determinism.check(parse(text, "proto/magnetar/runtime/clock.py")))
    assert [f.rule for f in without_allowed(clock, determinism.ALLOWED)] == ["chance"]
    cli = list(determinism.check(parse(text, "client/magnetar/cli/commands/perf.py")))
    assert without_allowed(cli, determinism.ALLOWED) == []
    client = list(determinism.check(parse(text, "client/magnetar/client/producer.py")))
    assert [f.rule for f in without_allowed(client, determinism.ALLOWED)] == ["clock", "chance"]


def test_every_exception_has_a_reason() -> None:
    for line in determinism.ALLOWED:
        assert len(line.reason.split()) >= 3, line
        assert line.rules <= determinism.RULES


def test_production_sources_are_found_in_order() -> None:
    paths = [source.path for source in production_sources()]
    assert "proto/magnetar/proto/__init__.py" in paths
    assert "client/magnetar/cli/__init__.py" in paths
    assert not [path for path in paths if path.startswith("tests/")]
