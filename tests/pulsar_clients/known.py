"""What differs between Magnetar and Pulsar in the eyes of Pulsar's clients, and why: the table of docs/pulsar-clients.md.

As `pulsar_admin.known`: `command` is a scenario, and a difference is as `golden.compared` says it.
"""

from __future__ import annotations

from pulsar_admin.known import Known

KNOWN = (
    Known(
        "tenants and namespaces", "^(a_(namespace|tenant)_that_is_not_there|names_that_are_none)$",
        " is 'no error', not 'Topic(NotFound|DoesNotExistException)'",
        "they are made when they are used",
    ),
    Known(
        "names of partitions", "^names_that_are_none$", " is 'NotAllowedException', not 'no error'",
        "a name that ends like a partition's is that of a partition, and is there with its partitioned topic alone",
    ),
    Known(
        "names", "^(unusual_names|names_of_subscriptions)$", r"with space|per%20cent|a/b|a\?b|%41|^\.kept",
        "a name has letters, digits and `-=:._`, so that it can stand in paths and file names as it is",
    ),
    Known(
        "a subscription without a name", "^a_subscription_without_a_name$", "NotAllowedError",
        "it is refused as every name that is none",
    ),
    Known(
        "messages without a key", "^reading_compacted$", "",
        "compaction keeps them, unless `compaction_keyless` says otherwise",
    ),
    Known(
        "parts of a batch", "^acknowledged_by_batch_index$", r"\.id is '\d\S*', not '\d\[\d\]\S*'$",
        "a consumer that has not acknowledged by batch index yet gets single messages, each with an id of its own",
    ),
    Known(
        "parts of a batch after an unload", "^unloaded_with_batch_indexes$", "",
        "what was acknowledged by batch index does not come again, with Pulsar it does",
    ),
    Known(
        "removed messages of a batch", "^reading_compacted_batches$", "",
        "they do not come; this client shows those of Pulsar, which leaves their places, as empty ones",
    ),
    Known(
        "readers of several ranges of hashes", "^a_reader_of_some_ranges_of_hashes$", "",
        "what lies between the ranges does not come, with Pulsar it does",
    ),
    Known(
        "TLS to a port without it", "^tls_where_there_is_none$", "ConnectError",
        "the connection is closed at once; Pulsar lets the client wait",
    ),
)  # fmt: skip
