"""What names stand for: the addresses of a host, and the hosts that the SRV records of a service name."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket

from magnetar.proto.errors import ConnectionLost, InvalidArgument

from ..service_url import Address, ServiceUrl

SRV_PREFIX = "_magnetar._tcp."


async def addresses_of(host: str, port: int) -> list[str]:
    """IP addresses of a host. Raises ConnectionLost."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return [host]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that DNS could have
        reason = getattr(error, "strerror", None) or error
        raise ConnectionLost(
            f"cannot connect to {host}:{port}: {reason}; is the name right, and can it be resolved here?"
        ) from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def check_resolvable(service: ServiceUrl) -> None:
    """Raises InvalidArgument if the URL needs a package that is not installed."""
    if service.srv_name:
        try:
            import dns.asyncresolver  # noqa: F401
        except ImportError:
            raise InvalidArgument(
                f"{service} needs the package dnspython, which is not installed: pip install 'magnetar[srv]', or name the "
                "hosts: magnetar://host:port,host:port"
            ) from None


async def hosts_of(service: ServiceUrl, rng: random.Random, timeout: float) -> list[Address]:
    """The hosts of a service in the order in which to try them, which differs from client to client.

    Those of SRV records by priority, and within one priority by chance, as their weights say (RFC 2782). Raises
    ConnectionLost if there are none.
    """
    if not service.srv_name:
        hosts = list(service.hosts)
        rng.shuffle(hosts)
        return hosts
    import dns.asyncresolver
    import dns.exception

    try:
        answer = await dns.asyncresolver.resolve(SRV_PREFIX + service.srv_name, "SRV", lifetime=timeout)
    except (dns.exception.DNSException, OSError) as error:
        raise ConnectionLost(
            f"no SRV records of {SRV_PREFIX}{service.srv_name}: {error}; is the name in {service} right?"
        ) from error
    # One of weight 2 comes before one of weight 1 twice as often as behind it.
    records = sorted(
        answer, key=lambda record: (record.priority, -(rng.random() ** (1 / max(record.weight, 0.01))))
    )
    return [(str(record.target).removesuffix("."), int(record.port)) for record in records]
