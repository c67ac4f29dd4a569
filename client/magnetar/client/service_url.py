"""Where a service is: URLs with one host, with several, or with a name whose SRV records say which.

    magnetar://host                          port 7650; a name may stand for several addresses, all of which are tried
    magnetar://a:7650,b:7651,[::1]:7650      several brokers of one cluster
    magnetar+srv://example.org               what _magnetar._tcp.example.org names

Any broker of a cluster tells where a topic is, so that each host that answers is as good as another.

>>> parse_url("magnetar://a,[::1]:7651").hosts
(('a', 7650), ('::1', 7651))
>>> str(parse_url("magnetar://a,[::1]:7651"))
'magnetar://a:7650,[::1]:7651'
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from magnetar.proto.errors import InvalidArgument
from magnetar.runtime.connection.addresses import format_address

from .durations import SECONDS, Seconds, set_in_seconds

DEFAULT_PORT = 7650
URL_FORMS = "magnetar://host:port, magnetar://host:port,host:port or magnetar+srv://name"

Address = tuple[str, int]
"""Host, a name or an IP address, and port."""

_NAME = r"[\w-]{1,63}(?:\.[\w-]{1,63})*\.?"
_HOST = re.compile(
    rf"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>{_NAME}))(?::(?P<port>[0-9]{{1,5}}))?"
)
_SRV_NAME = re.compile(_NAME)


@dataclass(frozen=True, slots=True)
class ServiceUrl:
    """Brokers of one cluster: `hosts`, or those that the SRV records of a name have."""

    hosts: tuple[Address, ...] = ()
    srv_name: str = ""

    def __str__(self) -> str:
        if self.srv_name:
            return f"magnetar+srv://{self.srv_name}"
        return f"magnetar://{','.join(map(format_address, self.hosts))}"


def parse_url(url: Any) -> ServiceUrl:
    """What a service URL says. Raises InvalidArgument, which shows the forms."""
    scheme, separator, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    rest = rest.removesuffix("/")
    if separator and scheme == "magnetar+srv" and _SRV_NAME.fullmatch(rest):
        return ServiceUrl(srv_name=rest)
    if separator and scheme == "magnetar":
        hosts = [_address(host.strip()) for host in rest.split(",")]
        if None not in hosts:
            return ServiceUrl(tuple(dict.fromkeys(host for host in hosts if host is not None)))
    raise InvalidArgument(f"not a service URL: {url!r} (want {URL_FORMS})")


def broker_address(url: str) -> Address:
    """The address of the one broker that a look-up named. Raises InvalidArgument."""
    hosts = parse_url(url).hosts
    if len(hosts) != 1:
        raise InvalidArgument(f"a look-up was answered with {url!r}, which does not name one broker")
    return hosts[0]


def _address(text: str) -> Address | None:
    parts = _HOST.fullmatch(text)
    if parts is None:
        return None
    port = int(parts["port"] or DEFAULT_PORT)
    return (parts["ipv6"] or parts["name"], port) if 0 < port < 65536 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoFailover:
    """In place of a service URL: two or more clusters, of which the client uses the first one that can be reached.

    primary is probed every check_interval (durations in seconds, or timedeltas). When it could not be reached for
    failover_delay, the client goes to the first of `secondary` that answers, with all its producers and consumers; when the
    primary has answered again for switch_back_delay, it goes back. What a message id or a cursor says is true in one cluster
    only: docs/client.md has what a switch does not promise.
    """

    primary: str
    secondary: Sequence[str]
    failover_delay: Seconds = 30.0 * SECONDS
    switch_back_delay: Seconds = 60.0 * SECONDS
    check_interval: Seconds = 15.0 * SECONDS

    def __post_init__(self) -> None:
        set_in_seconds(self)
        if isinstance(self.secondary, str) or not self.secondary:
            raise InvalidArgument(
                f"secondary is a list of service URLs, one at least, not {self.secondary!r}; "
                "without a second cluster give connect() the URL itself"
            )
        for name in ("failover_delay", "switch_back_delay", "check_interval"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidArgument(f"{name} must be greater than 0, not {getattr(self, name)!r}")
        if len(set(self.services)) != len(self.services):
            raise InvalidArgument(f"primary and secondary must differ: {', '.join(map(str, self.services))}")

    @property
    def services(self) -> tuple[ServiceUrl, ...]:
        """The primary, then the others in the order in which they are tried. Raises InvalidArgument."""
        return tuple(map(parse_url, (self.primary, *self.secondary)))
