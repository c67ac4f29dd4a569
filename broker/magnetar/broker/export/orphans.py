"""Staged ledgers of topics that nobody asks for: a broker that crashed, or lost a topic, left them.

Their transactions can only be swept by the topic's owner, so such a topic is loaded. One look at every topic's children
costs 10 us each with the embedded store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from magnetar.metadata import MetadataStore
from magnetar.proto.errors import MagnetarError, TopicNotFound
from magnetar.proto.ids import TopicName

from ..log.records import staged_path
from ..log.topic_names import list_topics
from .topic_export import TopicExport

_log = logging.getLogger(__name__)
_TOPICS_PER_TURN = 25
# A store without ranges sends all names of a namespace for each page.
_TOPICS_PER_PAGE = 10_000


async def find_staged(
    metadata: MetadataStore,
    serves: Callable[[TopicName], bool],
    export_of: Callable[[TopicName], Awaitable[TopicExport]],
    look: Callable[[TopicName], Awaitable[None]],
) -> None:
    """Loads every topic that has staged ledgers; those that are loaded learn of nodes that they do not know.

    `serves`: false for another broker's business. `export_of` loads a topic. `look` looks at each for something else.
    """
    after = ""
    while page := await list_topics(metadata, "", after=after, count=_TOPICS_PER_PAGE):
        for number, after in enumerate(page, 1):
            if number % _TOPICS_PER_TURN == 0:
                await asyncio.sleep(0)
            try:
                name = TopicName.parse(after)
                if not serves(name):
                    continue
                if await metadata.children(staged_path(name), limit=1):
                    await (await export_of(name)).staging.load()
                await look(name)
            except TopicNotFound:  # it was deleted meanwhile
                continue
            except MagnetarError as error:
                _log.warning("topic %s cannot be looked at yet: %s", after, error)
