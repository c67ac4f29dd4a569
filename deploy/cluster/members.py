"""The daemons of the cluster on this machine: names, ports, directories and command lines, in one place.

CLUSTER_DATA        directory of all their data; ./data/cluster
CLUSTER_BROKERS     number of brokers; 2
CLUSTER_PORTS       added to every port, so that a second cluster may run beside the first; 0
CLUSTER_ZONES       bookies and brokers are in so many zones in turn, zone-1 and so on, and copies in different ones; 0: none
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cluster", "Member", "WrongState", "zookeeper_class_path"]

ZOOKEEPERS = 3
BOOKIES = 3
MAX_BROKERS = 9
# Free of each other, also with nine brokers.
_PORT = {"zookeeper": 2181, "bookie": 3181, "broker": 7650}
_HTTP_PORT = {"bookie": 8001, "broker": 8081}
_QUORUM_PORT, _ELECTION_PORT = 2881, 2981
_PULSAR_PORT = 6650
_HOST = "127.0.0.1"
# Each entry goes to all three bookies and is confirmed by two. While one of them is away new ledgers have two copies.
_QUORUMS = {
    "broker.ensemble_size": 3,
    "broker.write_quorum": 3,
    "broker.ack_quorum": 2,
    "ledger.minimum_write_quorum": 2,
}
_JARS = ("zookeeper-3", "zookeeper-jute-", "slf4j-api-", "metrics-core-", "snappy-java-")
# Short-lived and small: the second compiler and the parallel collector cost more than they give.
_JAVA = ("-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-Xshare:auto")


class WrongState(Exception):
    """The cluster cannot be started; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Member:
    """One daemon."""

    kind: str  # "zookeeper", "bookie" or "broker"
    number: int  # from 1
    port: int
    http_port: int  # 0: it has none
    extra_ports: tuple[int, ...]  # those of an ensemble among themselves; a broker's for clients of Pulsar

    @property
    def name(self) -> str:
        """As in the table, and in the names of the data directories."""
        return f"{self.kind}-{self.number}"

    @property
    def ports(self) -> tuple[int, ...]:
        """All on which it listens."""
        return tuple(port for port in (self.port, self.http_port, *self.extra_ports) if port)


@dataclass(frozen=True, slots=True)
class Cluster:
    """All of them. `python` runs Magnetar."""

    data: Path
    brokers: int
    offset: int
    zones: int = 0
    python: str = sys.executable

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Cluster:
        """Raises WrongState."""
        brokers, offset = environment.get("CLUSTER_BROKERS", "2"), environment.get("CLUSTER_PORTS", "0")
        if not brokers.isdecimal() or not 1 <= int(brokers) <= MAX_BROKERS:
            raise WrongState(f"BROKERS={brokers} is not a number from 1 to {MAX_BROKERS}")
        if not offset.isdecimal() or int(offset) > 50_000:
            raise WrongState(
                f"CLUSTER_PORTS={offset} is not a number from 0 to 50000, which is added to every port"
            )
        zones = environment.get("CLUSTER_ZONES", "0")
        if not zones.isdecimal() or int(zones) > BOOKIES:
            raise WrongState(f"CLUSTER_ZONES={zones} is not a number from 0 to {BOOKIES}")
        data = Path(environment.get("CLUSTER_DATA", "data/cluster")).resolve()
        return cls(data, int(brokers), int(offset), int(zones))

    def members(self) -> list[Member]:
        """In the order in which they depend on each other."""
        counts = {"zookeeper": ZOOKEEPERS, "bookie": BOOKIES, "broker": self.brokers}
        return [
            self._member(kind, number) for kind, count in counts.items() for number in range(1, count + 1)
        ]

    def of_kind(self, kind: str) -> list[Member]:
        """Those of one kind."""
        return [member for member in self.members() if member.kind == kind]

    def _member(self, kind: str, number: int) -> Member:
        def port(first: int) -> int:
            return first + number - 1 + self.offset

        http_port = port(_HTTP_PORT[kind]) if kind in _HTTP_PORT else 0
        extra = {"zookeeper": (_QUORUM_PORT, _ELECTION_PORT), "broker": (_PULSAR_PORT,)}.get(kind, ())
        return Member(kind, number, port(_PORT[kind]), http_port, tuple(map(port, extra)))

    @property
    def metadata(self) -> str:
        """The address of the metadata that the daemons share."""
        return f"zk://{self._hosts('zookeeper')}/magnetar"

    @property
    def service_url(self) -> str:
        """What clients connect to: all brokers, any of which will do."""
        return f"magnetar://{self._hosts('broker')}"

    def _hosts(self, kind: str) -> str:
        return ",".join(f"{_HOST}:{member.port}" for member in self.of_kind(kind))

    def directory(self, member: Member) -> Path:
        """Its data."""
        return self.data / member.name

    def command(self, member: Member) -> list[str]:
        """How it is started. Writes the configuration of a ZooKeeper server. Raises WrongState."""
        if member.kind == "zookeeper":
            return ["java", *_JAVA, "-cp", zookeeper_class_path(), _MAIN, str(self._configure(member))]
        line = [self.python, "-m", "magnetar.cli.main", *self.arguments(member)]
        return [*line, "--metadata", self.metadata, "--log-level", "warning", "--log-format", "console"]

    def arguments(self, member: Member) -> list[str]:
        """Of the command `magnetar`, but for what is the same for all."""
        line = [member.kind, "--data", str(self.directory(member)), "--port", str(member.port)]
        line += ["--http-port", str(member.http_port)]
        if self.zones:
            zone = f"zone-{(member.number - 1) % self.zones + 1}"
            line += ["--set", f"{member.kind}.zone={zone}", "--set", "ledger.placement=zone"]
        if member.kind == "bookie":
            return [*line, "--id", member.name]
        line += ["--pulsar-port", str(member.extra_ports[0])]
        if self.brokers > 1:
            line += ["--set", f"broker.name={member.name}"]
        return line + [part for name, value in _QUORUMS.items() for part in ("--set", f"{name}={value}")]

    def _configure(self, member: Member) -> Path:
        directory = self.directory(member)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "myid").write_text(str(member.number))
        servers = [
            f"server.{server.number}={_HOST}:{server.extra_ports[0]}:{server.extra_ports[1]}"
            for server in self.of_kind("zookeeper")
        ]
        settings = [
            f"dataDir={directory}",
            f"clientPort={member.port}",
            f"clientPortAddress={_HOST}",
            "tickTime=500",
            "initLimit=20",
            "syncLimit=10",
            "admin.enableServer=false",
            "maxClientCnxns=0",
            "autopurge.purgeInterval=1",
            *servers,
        ]
        path = directory / "zoo.cfg"
        path.write_text("\n".join(settings) + "\n")
        return path


_MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"


def zookeeper_class_path() -> str:
    """Of the servers, which come with PySpark's jars. Raises WrongState."""
    if shutil.which("java") is None:
        raise WrongState(
            "there is no Java on this machine, and ZooKeeper needs one (Debian, Ubuntu: apt-get install "
            "openjdk-17-jre-headless)"
        )
    import importlib.util

    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise WrongState(
            "PySpark, whose jars hold ZooKeeper, is not installed: bash deploy/bootstrap.sh .venv server,dev,spark"
        )
    directory = Path(found.origin).parent / "jars"
    jars = {name: next(directory.glob(f"{name}*.jar"), None) for name in _JARS}
    missing = [name for name, jar in jars.items() if jar is None]
    if missing:
        raise WrongState(
            f"{directory} holds no {', '.join(missing)}: this PySpark brings no ZooKeeper any more"
        )
    return os.pathsep.join(map(str, jars.values()))
