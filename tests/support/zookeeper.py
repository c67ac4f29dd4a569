"""Real ZooKeeper servers for tests: started on free loopback ports, killed, paused and started again.

    def test_something(zookeeper: Ensemble) -> None:      # one server, shared by the tests of this process
        url = zookeeper.url + "/a-root-of-its-own"

    with Ensemble(tmp_path, servers=3) as ensemble:
        ensemble.start()                      # blocks until all of them serve
        ensemble.leader().kill()              # -9; .pause() and .resume(): SIGSTOP and SIGCONT
        ensemble.wait_serving()

The servers are those of PySpark's jars (ZooKeeper 3.9). Without Java or the jars these tests are skipped. A server dies
with the thread that started it, so start it from the main one.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from magnetar.metadata.zookeeper.store import ZooKeeperMetadataStore, ZooKeeperSettings, open_zookeeper_store
from magnetar.runtime.clock import elapsed_s
from support.service import held_port

__all__ = [
    "TICK_S",
    "Ensemble",
    "ZooKeeperMissing",
    "ZooKeeperServer",
    "ensemble_or_skip",
    "open_store",
    "opened",
    "zookeeper",
]

TICK_S = 0.5  # a session's timeout is 2 to 20 of them
_JARS = ("zookeeper-3", "zookeeper-jute-", "slf4j-api-", "metrics-core-", "snappy-java-")
_PR_SET_PDEATHSIG = 1
# Short-lived and small: the second compiler and the parallel collector cost more than they give.
_JAVA = ("-Xmx96m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")
_MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"


class ZooKeeperMissing(Exception):
    """This machine cannot run a server."""


def _class_path() -> str:
    """Of the servers. Raises ZooKeeperMissing."""
    if shutil.which("java") is None:
        raise ZooKeeperMissing(
            "there is no Java on this machine; ZooKeeper needs one (Debian, Ubuntu: openjdk-17-jre-headless)"
        )
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ZooKeeperMissing("PySpark, whose jars hold ZooKeeper, is not installed: make test installs it")
    jars = Path(spec.origin).parent / "jars"
    found = [next(jars.glob(f"{name}*.jar"), None) for name in _JARS]
    if None in found:
        raise ZooKeeperMissing(f"PySpark's jars hold no ZooKeeper any more: {dict(zip(_JARS, found))}")
    return os.pathsep.join(map(str, found))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ZooKeeperServer:
    """One server. `configuration` is what zoo.cfg has beside the directory and the port."""

    def __init__(self, directory: Path, port: int, configuration: str, number: int) -> None:
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self._directory = directory
        self._class_path = _class_path()
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True)
        (directory / "myid").write_text(str(number))
        (directory / "zoo.cfg").write_text(
            f"dataDir={directory}\nclientPort={port}\nclientPortAddress=127.0.0.1\ntickTime={int(TICK_S * 1000)}\n"
            f"admin.enableServer=false\n4lw.commands.whitelist=*\nmaxClientCnxns=0\n{configuration}"
        )

    def start(self) -> None:
        """Returns at once."""
        assert not self.running
        with open(self._directory / "output", "ab") as output:
            self._process = subprocess.Popen(
                ["java", *_JAVA, "-cp", self._class_path, _MAIN, str(self._directory / "zoo.cfg")],
                stdout=output, stderr=output, preexec_fn=_die_with_parent,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Started, and it has not ended; it may be paused."""
        return self._process is not None and self._process.poll() is None

    def status(self) -> str:
        """What the server says of itself; empty while it does not serve."""
        return self.ask("srvr")

    def ask(self, command: str) -> str:
        """The answer to one of ZooKeeper's four-letter commands; empty without one."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
                connection.sendall(command.encode())
                answer = b""
                while piece := connection.recv(65536):
                    answer += piece
        except OSError:
            return ""
        return answer.decode()

    @property
    def serving(self) -> bool:
        """Whether clients are served: alone, or as part of a quorum."""
        return self.status().startswith("Zookeeper version")

    def kill(self) -> None:
        """kill -9; returns when it is dead. May be called again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Its connections stay open and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """After `pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


class Ensemble:
    """One server, or several that elect a leader. As a context manager it kills them at the end."""

    def __init__(self, directory: Path, servers: int = 1, configuration: str = "") -> None:
        ports = [[held_port(self) for _ in range(3)] for _ in range(servers)]
        if servers > 1:
            configuration += "initLimit=10\nsyncLimit=4\n" + "".join(
                f"server.{number}=127.0.0.1:{quorum}:{election}\n"
                for number, (_, quorum, election) in enumerate(ports, 1)
            )
        self.servers = [
            ZooKeeperServer(directory / str(number), client, configuration, number)
            for number, (client, _, _) in enumerate(ports, 1)
        ]

    def __enter__(self) -> Ensemble:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for server in self.servers:
            server.kill()

    @property
    def hosts(self) -> str:
        """As in a URL."""
        return ",".join(server.address for server in self.servers)

    @property
    def url(self) -> str:
        """Without a root."""
        return f"zk://{self.hosts}"

    def start(self) -> None:
        """Starts those that do not run, and waits until all serve."""
        for server in self.servers:
            if not server.running:
                server.start()
        self.wait_serving()
        for server in self.servers:
            assert server.running, f"a server has ended: see {server._directory}"

    def wait_serving(self) -> None:
        """Until every server that runs serves."""
        while not all(server.serving for server in self.servers if server.running):
            time.sleep(0.02)

    def leader(self) -> ZooKeeperServer:
        """The one that leads, of several."""
        return next(server for server in self.servers if "Mode: leader" in server.status())


async def open_store(
    url: str,
    *,
    make_root: bool = False,
    settings: ZooKeeperSettings | None = None,
    clock: Callable[[], float] = elapsed_s,
    tls: ssl.SSLContext | None = None,
) -> ZooKeeperMetadataStore:
    """A store; whoever opens it closes it."""
    return await open_zookeeper_store(
        url, rng=random.Random(url), clock=clock, tls=tls, make_root=make_root, settings=settings
    )


@contextlib.asynccontextmanager
async def opened(
    url: str,
    *,
    settings: ZooKeeperSettings | None = None,
    clock: Callable[[], float] = elapsed_s,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[ZooKeeperMetadataStore]:
    """The same as a context, which closes it."""
    store = await open_store(url, settings=settings, clock=clock, tls=tls)
    try:
        yield store
    finally:
        await store.close()


class _SharedEnsemble(Ensemble):
    """Whoever asks for its address finds it serving: one that has died fails the test that used it, and none after it."""

    @property
    def hosts(self) -> str:
        if not all(server.running for server in self.servers):
            self.start()
        return super().hosts


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    """One server for all tests of this process. They use roots of their own, and leave it running."""
    with ensemble_or_skip(tmp_path_factory.mktemp("zookeeper"), of=_SharedEnsemble) as ensemble:
        ensemble.start()
        yield ensemble


def ensemble_or_skip(
    directory: Path, servers: int = 1, configuration: str = "", *, of: type[Ensemble] = Ensemble
) -> Ensemble:
    """An ensemble that was not started, or the end of the test."""
    try:
        return of(directory, servers, configuration)
    except ZooKeeperMissing as missing:
        pytest.skip(str(missing))
