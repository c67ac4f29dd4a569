"""Every setting of a daemon: the sections [daemon] (the process), [bookie], [broker], [ledger] (its client), [repair] and
[balance].

Defaults < TOML file (`--config`, MAGNETAR_CONFIG) < environment (MAGNETAR_<SECTION>_<NAME>) < flags. A flag of the command
line is a setting of one of the sections; `--set section.name=value` reaches the ones without a flag.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from msgspec import Meta

from magnetar.proto.errors import InvalidSetting
from magnetar.proto.frames import DEFAULT_MAX_MESSAGE_BYTES
from magnetar.runtime.settings import Loaded, load_settings

from .flags import SECTIONS, parse_assignment

if TYPE_CHECKING:
    from magnetar.bookie.settings import BookieSettings
    from magnetar.broker.ownership.balance import BalanceSettings
    from magnetar.broker.settings import BrokerSettings
    from magnetar.ledger.replication.settings import RepairSettings
    from magnetar.ledger.settings import LedgerSettings

T = TypeVar("T")

CONFIG_VARIABLE = "MAGNETAR_CONFIG"
MIB = 1024 * 1024
_log = logging.getLogger("magnetar.settings")
# A bookie of its own leaves 8080 to a broker on the same host.
BOOKIE_HTTP_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """What belongs to the process, not to a room. Port 0 takes a free one."""

    data: Annotated[str, Meta(min_length=1, description="data directory")] = "./data"
    host: Annotated[str, Meta(min_length=1, description="address to listen on")] = "127.0.0.1"
    advertised_host: Annotated[str, Meta(description="address that clients connect to; empty: host")] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="native protocol")] = 7650
    http_port: Annotated[
        int, Meta(ge=0, le=65535, description="metrics and health; 8000 for `magnetar bookie`")
    ] = 8080
    bookie_port: Annotated[int, Meta(ge=0, le=65535, description="bookie protocol")] = 3181
    bookies: Annotated[
        tuple[str, ...], Meta(description="broker: host:port of each bookie, or id=host:port")
    ] = ()
    metadata: Annotated[
        str, Meta(description="shared metadata: zk://host:port,.../root; empty: a store of this daemon's own")
    ] = ""
    session_timeout_s: Annotated[
        float,
        Meta(
            ge=1, le=120, description="silence after which a daemon counts as lost; ZooKeeper has bounds, too"
        ),
    ] = 4.0
    max_message_bytes: Annotated[int, Meta(ge=1024, le=1 << 27, description="largest message")] = 5 << 20
    drain_s: Annotated[float, Meta(ge=0, description="how long SIGTERM may take")] = 10.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least important line that is logged")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "console", "json"], Meta(description="auto: console on a terminal, else json")
    ] = "auto"

    @property
    def host_for_clients(self) -> str:
        """The address for clients; never a wildcard, to which nobody can connect."""
        if self.advertised_host:
            return self.advertised_host
        if self.host in ("0.0.0.0", "::"):
            import socket

            return socket.gethostname()
        return self.host


@dataclass(frozen=True, slots=True)
class SettingSources:
    """Where settings come from: file, environment, and flags by section."""

    config: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of_process(cls, flags: Mapping[str, Mapping[str, Any]], config: str | None = None) -> SettingSources:
        """The environment of this process; MAGNETAR_CONFIG names a file unless `config` does."""
        return cls(config or os.environ.get(CONFIG_VARIABLE) or None, dict(os.environ), flags)

    @classmethod
    def of_options(
        cls, data: str | None, config: str | None, assignments: Iterable[str] | None
    ) -> SettingSources:
        """Of the process, and what a command was given as --data, --config and --set. Raises InvalidSetting."""
        flags: dict[str, dict[str, Any]] = {"daemon": {"data": data}} if data else {}
        for text in assignments or ():
            section, name, value = parse_assignment(text)
            flags.setdefault(section, {})[name] = value
        return cls.of_process(flags, config)

    def load(self, section: str, cls: type[T], **derived: Any) -> Loaded[T]:
        """One section. `derived` are defaults that follow from other settings. Raises InvalidSetting."""
        return load_settings(
            cls,
            section=section,
            toml_path=self.config,
            environment=self.environment,
            flags=self.flags.get(section),
            derived=derived,
            known_sections=SECTIONS,
        )


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """All settings of a daemon, validated."""

    daemon: DaemonSettings
    bookie: BookieSettings
    broker: BrokerSettings
    ledger: LedgerSettings
    repair: RepairSettings
    balance: BalanceSettings
    pulsar_port_given: bool = True  # else it is the default, and a service goes without if it is taken

    @property
    def lock_path(self) -> str:
        """Held by the daemon while it runs."""
        return os.path.join(self.daemon.data, "LOCK")

    @property
    def metadata_directory(self) -> str:
        """The embedded metadata store."""
        return os.path.join(self.daemon.data, "metadata")


def load_all(sources: SettingSources, command: str = "standalone") -> list[Loaded[Any]]:
    """All sections in the order of SECTIONS. What follows from a setting of [daemon] is derived here. InvalidSetting."""
    from magnetar.bookie.settings import BookieSettings
    from magnetar.broker.ownership.balance import BalanceSettings
    from magnetar.broker.settings import BrokerSettings
    from magnetar.ledger.replication.settings import RepairSettings
    from magnetar.ledger.settings import LedgerSettings
    from magnetar.proto.frames import FRAME_OVERHEAD_BYTES

    daemon = sources.load(
        "daemon",
        DaemonSettings,
        **({"http_port": BOOKIE_HTTP_PORT} if command in ("bookie", "autorecovery") else {}),
    )
    _warn_of_short_names(sources.environment, daemon.sources)
    values = daemon.value
    derived: dict[str, Any] = {"data_directory": os.path.join(values.data, "bookie")}
    if values.max_message_bytes > DEFAULT_MAX_MESSAGE_BYTES:
        # A message must fit into an entry, an entry into one memtable of the write cache and into the ring.
        entry = values.max_message_bytes + FRAME_OVERHEAD_BYTES
        derived |= {
            "max_entry_bytes": entry,
            "write_cache_bytes": max(64 * MIB, 2 * entry),
            "journal_ring_bytes": max(32 * MIB, 2 * entry + MIB),
        }
    bookie = sources.load("bookie", BookieSettings, **derived)
    url = f"magnetar://{format_host(values.host_for_clients)}:{values.port}"
    attach_min_bytes = max(0, bookie.value.max_entry_bytes - MIB)
    ledger, repair = sources.load("ledger", LedgerSettings), sources.load("repair", RepairSettings)
    broker = sources.load(
        "broker",
        BrokerSettings,
        service_url=url,
        http_url=f"http://{format_host(values.host_for_clients)}:{values.http_port}",
        attach_min_bytes=attach_min_bytes,
        minimum_write_quorum=ledger.value.minimum_write_quorum,
    )
    return [daemon, bookie, broker, ledger, repair, sources.load("balance", BalanceSettings)]


def _warn_of_short_names(environment: Mapping[str, str], names: Iterable[str]) -> None:
    """Warns of unknown variables: MAGNETAR_PORT for MAGNETAR_DAEMON_PORT would be ignored silently."""
    for name in names:
        variable = f"MAGNETAR_{name.upper()}"
        # Kubernetes sets MAGNETAR_PORT=tcp://10.0.0.1:7650 beside a Service called magnetar.
        if variable in environment and not environment[variable].startswith("tcp://"):
            _log.warning(
                "environment variable %s is no setting; did you mean MAGNETAR_DAEMON_%s?",
                variable,
                name.upper(),
            )


def service_settings(sources: SettingSources, command: str = "standalone") -> ServiceSettings:
    """The values alone, for this daemon. Raises InvalidSetting."""
    loaded = load_all(sources, command)
    given = {section.section: section.sources for section in loaded}["broker"]["pulsar_port"] != "default"
    return replace(ServiceSettings(*(section.value for section in loaded)), pulsar_port_given=given)


def check_bookie_count(settings: ServiceSettings, count: int, where: str) -> None:
    """Raises InvalidSetting when no ledger could ever be made: better than topics that cannot be written to."""
    if count >= settings.broker.bookies_needed:
        return
    size, minimum = settings.broker.ensemble_size, settings.broker.minimum_write_quorum
    raise InvalidSetting(
        f"broker.ensemble_size={size} needs {size} bookies, and there {'is' if count == 1 else 'are'} {count} ({where}); "
        "lower broker.ensemble_size (and write_quorum, ack_quorum), or let it have more bookies"
        + (f"; broker.minimum_write_quorum={minimum} allows no fewer either" if minimum else "")
    )


def format_host(host: str) -> str:
    """With brackets around an IPv6 address."""
    return f"[{host}]" if ":" in host else host


def parse_bookies(texts: Iterable[str]) -> dict[str, tuple[str, int]]:
    """`host:port`, which is then the id as well, or `id=host:port`. Raises InvalidSetting."""
    from magnetar.ledger.directory import parse_address

    bookies: dict[str, tuple[str, int]] = {}
    for text in texts:
        name, equals, address = text.partition("=")
        if name in bookies:
            raise InvalidSetting(f"bookie {name} is listed twice in --bookies; name each once")
        bookies[name] = parse_address(address if equals else text)
    return bookies
