"""Who the peer is and what it may do. Until security is configured everybody is "anonymous" and may do everything.

The accepting side has an `Authenticator`, the connecting side `Credentials`. Data travels as the payload of CONNECT,
AUTH_CHALLENGE (either way, as often as the method wants, at most MAX_ROUNDS times) and CONNECTED.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from magnetar.proto.errors import AuthenticationFailed

MAX_ROUNDS = 8
ANONYMOUS = "anonymous"


class Authenticated(NamedTuple):
    """The peer is `principal`; `data` goes back to it with CONNECTED."""

    principal: str
    data: bytes = b""


class Challenge(NamedTuple):
    """The peer must answer `data` first."""

    data: bytes


class AuthenticationExchange(Protocol):
    """One peer's authentication, in one or more rounds."""

    def respond(self, data: bytes) -> Authenticated | Challenge:
        """Takes what the peer sent. Raises AuthenticationFailed. Must not block."""


class Authenticator(Protocol):
    """The accepting side."""

    def begin(self, method: str) -> AuthenticationExchange:
        """A new exchange by the method that the peer chose. Raises AuthenticationFailed naming the methods offered."""


class Credentials(Protocol):
    """The connecting side. `begin` is called once per connection."""

    @property
    def method(self) -> str:
        """Name of the method, for CONNECT."""

    def begin(self) -> bytes:
        """Data for CONNECT."""

    def respond(self, challenge: bytes) -> bytes:
        """The answer to a challenge. Raises AuthenticationFailed."""


# Called for every command that touches a resource, with principal, operation and resource. Raises NotAuthorized.
Authorize = Callable[[str, str, str], None]


class NoAuthentication:
    """Accepts the method "none" and nothing else: security is not configured."""

    def begin(self, method: str) -> NoAuthentication:
        if method != "none":
            raise AuthenticationFailed(
                f"authentication by {method[:40]!r} is not configured here; connect with method 'none'"
            )
        return self

    def respond(self, data: bytes) -> Authenticated:
        """Everybody is anonymous."""
        return Authenticated(ANONYMOUS)


class NoCredentials:
    """The method "none"."""

    method = "none"

    def begin(self) -> bytes:
        """No data."""
        return b""

    def respond(self, challenge: bytes) -> bytes:
        """There is nothing to answer with."""
        raise AuthenticationFailed("the server asks for credentials and none are configured; set them")


def allow_all(principal: str, operation: str, resource: str) -> None:
    """Everybody may do everything: security is not configured."""
