"""A client of Pulsar's protocol that does what Java's and C++'s do, so far as a broker sees it; on any asyncio loop.

    client      look-ups, partitions, one connection for each broker
    connection  frames, requests and their answers, keep-alive
    attachment  keeps a producer or a consumer at whichever broker has its topic
    producer    batches, chunks, and what has no receipt sent again
    consumer    permits, acknowledgements, redelivery, seeks
    unacked     which messages of each batch are not acknowledged, and the ids that acknowledge others

No retry topics, dead letters, schemas or transactions: a broker sees nothing of the first two.
"""

from .client import PulsarClient
from .consumer import Consumer, ConsumerOptions, Received
from .producer import Producer, ProducerOptions
from .unacked import Id

__all__ = ["Consumer", "ConsumerOptions", "Id", "Producer", "ProducerOptions", "PulsarClient", "Received"]
