"""Commands about the brokers of a cluster and the bundles that they own (76 to 80); any broker answers them.

A broker that is alone, as in standalone, answers them as a cluster of one. broker/CLUSTER.md explains the words.
"""

from __future__ import annotations

from .command import Command

__all__ = ["Drain", "ListBrokers", "ListBundles", "SplitBundle", "UnloadBundle"]


class ListBrokers(Command, tag=76):
    """Ok: {"brokers": [{"name", "url", "zone", "group", "state", "started_ms", "version", "load"}, ...], "balancer"}.

    By name. `state`: ready, draining, stopping.
    """


class ListBundles(Command, tag=77):
    """Ok: {"bundles": [{"bundle": "tenant/ns/range", "broker", "url", "to"}, ...]}; empty names where nobody owns it."""

    namespace: str


class UnloadBundle(Command, tag=78):
    """Its owner hands the bundle over to the broker named `to`, or to one that placement chooses. Ok: null, when it is done.

    `bundle` is "tenant/ns/range", or a topic, which means its bundle. Without `to` nothing happens if nobody owns it.
    InvalidArgument for a bundle or a broker that is not there.
    """

    bundle: str
    to: str = ""


class SplitBundle(Command, tag=79):
    """Divides a bundle in two, by its topics if they are loaded. Ok: {"bundles": [its parts]}, when it is done."""

    bundle: str


class Drain(Command, tag=80):
    """A broker or a bookie, or all of a zone, hand over all they have, and get nothing until `undo`.

    Ok: {"brokers": [names], "bookies": [names], "bundles": how many these brokers own, "ledgers": how many name one of these
    bookies, "open_ledgers": how many of them are open, "notes": {ledger: why it could not be copied}}. `kind` is "broker" or
    "bookie", where one of each has the name. InvalidArgument when there is none, or the others could not hold all that.
    """

    name: str = ""
    zone: str = ""
    kind: str = ""
    undo: bool = False
