"""Search: whom to ask next where a topic is served.

Any broker answers a look-up (broker/CLUSTER.md): with the owner ("final"), or with the broker to ask instead.

    where it stands    what happened                                   what comes next
    asking             answered U, final                               connect to U
    asking             answered U, not final                           ask U, authoritative; after ten of these: failed
    asking             a broker that was named cannot be reached       ask any other one, unreachable=that one
    asking             nobody can be reached                           failed
    connecting to U    U cannot be reached                             ask any other one, unreachable=U
    connecting to U    U was reported as unreachable in this search    failed
                       already, and cannot be reached

The broker that is asked with `unreachable` holds its answer until the topic has another owner. So a search that meets a
failed owner learns of the successor the moment there is one, and connects to it at once.

>>> search = Search()
>>> search.begin()
Ask(url='', authoritative=False, unreachable='')
>>> search.answered("magnetar://x", True)
Connect(url='magnetar://x', again=False)
>>> search.unreachable()
Ask(url='', authoritative=False, unreachable='magnetar://x')
>>> search.answered("magnetar://y", False)
Ask(url='magnetar://y', authoritative=True, unreachable='')
>>> search.answered("magnetar://y", True)
Connect(url='magnetar://y', again=False)
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_REDIRECTS = 10


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a look-up to the broker at `url`; "": to any broker of the service, but not to the one that is unreachable."""

    url: str = ""
    authoritative: bool = False
    unreachable: str = ""


@dataclass(frozen=True, slots=True)
class Connect:
    """The topic is served at `url`; `again`: the service says so though it was told that nobody can be reached there."""

    url: str
    again: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """This search ends. `why` is what to add to the last error; "": that says it all."""

    why: str = ""


Step = Ask | Connect | Failed


class Search:
    """The search for one topic, once. See the module docstring."""

    def __init__(self) -> None:
        self._step: Step = Failed()
        self._redirects = 0  # answers that were not final, at most MAX_REDIRECTS
        self._reported: list[str] = []  # URLs that were asked about as unreachable; each once

    def begin(self, first: str = "") -> Step:
        """`first`: where the topic went, as its last broker said."""
        return self._next(Ask(first, authoritative=bool(first)))

    def answered(self, url: str, final: bool) -> Step:
        """The broker that was asked has answered."""
        if final:
            return self._next(Connect(url, again=url in self._reported))
        self._redirects += 1
        if self._redirects > MAX_REDIRECTS:
            return self._next(Failed(f"{MAX_REDIRECTS} brokers, one after another, sent this client on"))
        return self._next(Ask(url, authoritative=True))

    def unreachable(self) -> Step:
        """Nobody could be connected to for the last step, or the connection broke."""
        step = self._step
        url = "" if isinstance(step, Failed) else step.url
        if not url or url in self._reported:
            return self._next(Failed())
        self._reported.append(url)
        return self._next(Ask(unreachable=url))

    def _next(self, step: Step) -> Step:
        self._step = step
        return step
