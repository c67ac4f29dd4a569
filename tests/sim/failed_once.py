"""Seeds that found something once: `make sim` plays them before the others, and so does the long form of test_simulation.

A seed means another history once anything draws from the generator that did not before, so what was found is pinned by
tests of its own too; these are as good as any other seed, and cost nothing to keep.
"""

__all__ = ["FAILED_ONCE"]

# Scenario -> seed -> what it found.
FAILED_ONCE: dict[str, dict[int, str]] = {
    "cluster": {
        6: "a broker that had stood still sent receipts of acknowledgements before it was fenced",
        9: "look-ups that came together made two ends for one arrival, and none held the bundle",
        10: "a request whose deletion was lost stayed for ever",
        17: "a broker that could not write what it says of itself gave up its session, and went on",
        24: "a topic that was being closed when the session was lost sent receipts in the next session",
        41: "a broker whose session could not be closed did not stop",
        42: "a broker that was told to stop while it had no session took bundles in the next one",
        53: "a subscription was stored, which its broker did not learn, and what it was to begin with was trimmed",
        110: "a bundle was divided twice at one hash, which damaged the bounds of its namespace",
        310: "a part that was found before the answer to a split was divided, and then held as a whole again",
        449: "topics that had not arrived were unloaded one after another; a receipt waited for a deletion",
    },
    "mixed": {
        189: "as 130 of mixed_once",
        71113: "the same beside the rest of the batch, which came as one with an ack set once its other consumer had left",
    },
    "mixed_once": {
        111: "the last chunk of a message overtook its first one, whose entry was set aside for another message's owner",
        130: "the first message of a batch that had gone out in parts was taken for the batch by the topic's next owner",
        172: "the first message of a batch that had gone out alone was taken for the batch, which its consumer had by then",
        700081: "a batch of which one message was acknowledged elsewhere was taken for its first one",
    },
    "once": {
        18: "behind a seek the chunks of a message that one consumer had had whole were shared out, and nobody had it",
        24: "chunks that came while their consumer left became dead letters, each by itself; the checker held a former "
        "owner's receipt of a duplicate, which is stored, for one of what is not",
        47: "a topic's last ledger was trimmed by its owner while another broker took it over, which took that for damage",
        100: "the checker forgot at a seek that a consumer still sent an acknowledgement of what another one got then",
        116: "the checker held a former owner's receipt of what was acknowledged already for one of what it had written",
        140: "producers were let in while policies were not known, and deduplication did not know what they stored",
        153: "a broker that stopped told who subscribed just then that the consumer was closed, which is final",
        251: "what a broker handed over while it stopped went on in its next session, and took the next owner's node away",
    },
    "once_delayed": {
        19: "the checker held a former owner's receipt of what was acknowledged already for one of what it had written",
        81: "a broker that had stood still gave out again what was acknowledged at the next owner, before it was fenced",
    },
    "once_repaired": {
        16: "chunks that were given back before the answer to a seek were never asked for again"
    },
    "standalone": {
        112: "bytes written after a cut of the network arrived behind those that the cut took",
        120: "the checker held a consumer to what a seek had taken back from it",
        156: "the checker wanted a dead letter that a seek had passed over before it was written",
    },
    "deferred": {624: "so rough that nothing was written, and the storm did not become mild enough"},
    "ledgers": {
        1072: "the reader of a closed ledger that was deleted asked a bookie that was gone, for ever"
    },
}
