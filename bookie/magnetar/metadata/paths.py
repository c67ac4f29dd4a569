"""Paths in the metadata store that several rooms know."""

from __future__ import annotations

# A cluster is what shares one metadata store: its instance, 64 random bits, is made once.
INSTANCE_PATH = "/instance"
COOKIES_PATH = "/cookies"
# Its children are the bookies, the brokers that an operator drains (`drains`).
DRAINING_BOOKIES_PATH = "/draining"
DRAINING_BROKERS_PATH = "/draining-brokers"
# Ephemeral: the name of the process that audits the ledgers.
AUDITOR_PATH = "/auditor"
# Its children are the brokers that registered and did not stop since: who is not registered any more was killed.
KNOWN_BROKERS_PATH = "/known-brokers"


def cookie_path(bookie_id: str) -> str:
    """The node that knows which data directory a bookie has."""
    return f"{COOKIES_PATH}/{bookie_id}"


def known_broker_path(name: str) -> str:
    """The node of a broker that registered and did not stop since."""
    return f"{KNOWN_BROKERS_PATH}/{name}"
