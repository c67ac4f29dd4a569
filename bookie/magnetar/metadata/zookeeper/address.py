"""Where the metadata is: `zk://user:password@a:2181,[::1]:2181,b/root`.

scheme       zk, or zk+tls for TLS
credentials  of the scheme `digest`; they may be percent-encoded
hosts        separated by commas, as `host` or `host:port` (2181)
root         the node below which everything is: ZooKeeper's chroot. Without it: the whole tree
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

from magnetar.proto.errors import InvalidArgument, InvalidSetting
from magnetar.runtime.connection.addresses import format_address

from ..store import split_path
from .namespace import ENCODED

SETTING = "metadata"
DEFAULT_PORT = 2181
_TLS = {"zk": False, "zk+tls": True}
_EXAMPLE = "want zk://host:port,host:port/root"


@dataclass(frozen=True, slots=True)
class ZooKeeperAddress:
    """See the module docstring. `root` is "" or "/name/name"."""

    hosts: tuple[tuple[str, int], ...]
    root: str = ""
    credentials: str | None = None
    tls: bool = False

    def __str__(self) -> str:
        """As it was given, but without the password."""
        hosts = ",".join(map(format_address, self.hosts))
        user = "" if self.credentials is None else self.credentials.partition(":")[0] + "@"
        return f"zk{'+tls' if self.tls else ''}://{user}{hosts}{self.root}"


def parse_address(text: str) -> ZooKeeperAddress:
    """Raises InvalidSetting, which does not show the password."""
    scheme, separator, rest = text.strip().partition("://")
    if not separator or scheme not in _TLS:
        raise _refused(f"{scheme[:20]!r} is no scheme of a metadata store; {_EXAMPLE}")
    authority, slash, root = rest.partition("/")
    credentials, at, hosts = authority.rpartition("@")
    if at and not (":" in credentials and credentials.partition(":")[0]):
        raise _refused("the part before @ must be user:password")
    try:
        split_path(slash + root.rstrip("/") or "/")
    except InvalidArgument as error:
        raise _refused(f"the root is {error.message}") from None
    if found := ENCODED.search(root):
        raise _refused(f"the root cannot have the character {found[0]!r}")
    return ZooKeeperAddress(
        tuple(_host(host) for host in hosts.split(",")),
        slash + root if (root := root.rstrip("/")) else "",
        unquote(credentials) if at else None,
        _TLS[scheme],
    )


def _host(text: str) -> tuple[str, int]:
    host, port = text, ""
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise _refused(f"{text!r} is not [address]:port")
        port = port[1:]
    elif ":" in text:
        host, _, port = text.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        raise _refused(f"{text!r} is not host:port (an IPv6 address stands in brackets)")
    return host, int(port) if port else DEFAULT_PORT


def _refused(problem: str) -> InvalidSetting:
    return InvalidSetting(f"setting {SETTING}: {problem}", setting=SETTING)
