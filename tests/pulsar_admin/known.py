"""What differs between Magnetar and Pulsar in the eyes of pulsar-admin, and why: the table of docs/pulsar-admin.md.

A difference is explained by the first row whose `command` and `differs`, both regular expressions, are found in the command
and in the difference as `golden.compared` says it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Known(NamedTuple):
    """A row. `what` and `reason` are for people."""

    what: str
    command: str
    differs: str
    reason: str


_NEVER = r"^status: 501, not|^printed is 'it failed, |^exit code: 1, not 0"
_AFTER_IT = r"^(answer|printed)\."

KNOWN = (
    Known("the version", "^brokers version", "^printed", "it is Magnetar's own"),
    Known(
        "settings of a broker", "^brokers (get-(internal|runtime)-config|list-dynamic-config)", "",
        "a broker has settings of its own",
    ),
    Known(
        "load report of a broker", "^broker-stats load-report", "^status: 200, not 204|^printed",
        "Magnetar answers its load; Pulsar's load manager nothing",
    ),
    Known(
        "figures of a broker", r"broker-stats (topics|monitoring-metrics)", "^answer|^printed",
        "counters have names of their own; internal topics and bundles are others",
    ),
    Known("mbeans", r"broker-stats mbeans", _NEVER, "there is no Java virtual machine; `/metrics` has the figures"),
    Known(
        "racks of bookies", "^bookies (set|get|delete)-bookie-rack|^bookies racks-placement",
        rf"{_NEVER}|^status: 404, not 200|{_AFTER_IT}default", "a bookie says its rack in its own settings",
    ),
    Known("resource quotas", "^resource-quotas", _NEVER, "bundles are balanced by their measured load"),
    Known(
        "isolation of namespaces", "^ns-isolation-policy", rf"{_NEVER}|^status: 404, not 200",
        "a namespace names the group of brokers that serve it: the policy `broker_group`",
    ),
    Known(
        "transactions, functions, packages", "^(transactions|functions|packages) ", _NEVER,
        "Magnetar has none; a Pulsar on which they are not enabled answers 503 or 409",
    ),
    Known("internal tenants", r"^(\$ )?tenants list", "^printed", "the internal tenant is `magnetar`, Pulsar's is `pulsar`"),
    Known(
        "number of bundles", "^namespaces (policies|bundles|split-bundle|unload)",
        r"(boundaries|numBundles) is|^status: 412, not 204|^printed is 'it failed",
        "a broker that is alone has one bundle in each namespace",
    ),
    Known(
        "policies of a namespace as a whole", "^namespaces policies acme/one",
        r"(offload_policies|PersistentEnabled) is missing|subscription_auth_mode is 'None'",
        "Pulsar shows policies of offloading that nobody set, and one that was removed",
    ),
    Known(
        "roles of subscriptions", "^namespaces .*subscription-(auth-mode|permission)", _NEVER,
        "permissions are of namespaces and topics",
    ),
    Known(
        "replicated subscriptions", "^topics (get|set)-replicated-subscription-status", _NEVER,
        "a topic is of one cluster",
    ),
    Known(
        "shadow topics", "^topics get-shadow-topics", "^status: 501, not 200|^printed",
        "there are none; of Pulsar's answer its tool prints an exception of its own",
    ),
    Known(
        "a subscription that does not exist",
        "^topics (peek-messages|skip|reset-cursor|unsubscribe) .*--subscription nosuch",
        "^status: 404, not 20|^printed is", "it is not made by looking at it, and is said not to be there",
    ),
    Known(
        "ledgers of an empty topic", "^topics ((partitioned-)?stats-internal|info-internal)",
        r"\.state is '(ClosedLedger|NoLedger)'|ledgers",
        "a ledger, and the one of a cursor, is made when something is stored there",
    ),
    Known(
        "cursors", "^topics stats-internal",
        r"__compaction is missing|aiting(ReadOp|CursorsCount) is|FirstNotAckedMessage is",
        "compaction has no cursor; one that has read all waits for more",
    ),
    Known(
        "partitioned topics as a whole", "^topics (stats|last-message-id|stats-internal|compaction-status) .*/many$",
        "^status: (405|200), not 404|^printed is",
        "Pulsar answers that there is none; Magnetar that it has partitions, or for all of them",
    ),
    Known(
        "what all partitions expired", "^topics expire-messages .*/many ", "^status: 204, not 409|^printed is",
        "Pulsar refuses where a partition has nothing to expire",
    ),
    Known(
        "one of several partitions", "^topics delete .*/many-partition", "^status: 412, not 204|^printed",
        "it is not deleted alone, as messages of its keys would have no place",
    ),
    Known("bytes", "^topics get-backlog-size", "^printed is", "messages are stored in another form"),
    Known(
        "retention and quotas", "^topicPolicies (set|get)-retention", "",
        "Pulsar refuses retention beyond its default backlog quota; Magnetar has no default that it would exceed",
    ),
    Known(
        "names", r"odd\?name", "^status: 412, not|^printed is|^answer",
        "a name has letters, digits and `-=:._`, so that it can stand in paths and file names as it is",
    ),
)  # fmt: skip


def explained(command: str, difference: str, rows: Sequence[Known] = KNOWN) -> Known | None:
    """The row that does; None: nothing does."""
    return next(
        (row for row in rows if re.search(row.command, command) and re.search(row.differs, difference)), None
    )


def table(rows: Sequence[Known] = KNOWN) -> str:
    """As the page has it."""
    lines = "".join(f"| {row.what} | {row.reason} |\n" for row in rows)
    return f"| what differs | why |\n|---|---|\n{lines}"
