"""The topics that there are, as the metadata store has them."""

from __future__ import annotations

import asyncio
import logging

from magnetar.metadata import MetadataStore
from magnetar.proto.errors import InvalidArgument, InvalidTopicName
from magnetar.proto.ids import TopicName

from .records import TOPICS_ROOT

_SOME = 100  # nodes with others below them that are listed in a turn of the loop: a millisecond
_log = logging.getLogger(__name__)


async def list_topics(
    metadata: MetadataStore, namespace: str, *, after: str = "", count: int, root: str = TOPICS_ROOT
) -> list[str]:
    """At most `count` full names behind `after`, ordered by tenant, namespace, domain and name.

    `namespace`: `tenant/namespace`, or all if empty. A node whose name no topic can have is left out.
    `root`: the nodes below PARTITIONED_ROOT are partitioned topics.
    """
    parts = namespace.split("/") if namespace else []
    if namespace and (len(parts) != 2 or not all(parts)):
        raise InvalidArgument(f"not a namespace: {namespace!r} (want tenant/namespace)")
    behind: list[str] = []
    if after:
        domain, tenant, its_namespace, name = TopicName.parse(after)
        behind = [tenant, its_namespace, domain, name][len(parts) :]
    top = "/".join([root, *parts])
    names: list[str] = []
    more = True
    while more and len(names) < count:
        wanted = count - len(names)
        paths = await _nodes(metadata, top, 4 - len(parts), behind, wanted)
        for path in paths:
            tenant, space, domain, name = path.removeprefix(f"{root}/").split("/")
            try:
                names.append(str(TopicName.parse(f"{domain}://{tenant}/{space}/{name}")))
            except InvalidTopicName as error:
                _log.warning("%s is left out of the list of topics: %s", path, error)
        if more := len(paths) == wanted:
            behind = paths[-1].removeprefix(f"{top}/").split("/")
    return names


async def _nodes(metadata: MetadataStore, path: str, levels: int, after: list[str], count: int) -> list[str]:
    """At most `count` nodes that stand `levels` below a path, behind the one whose names below it are `after`."""
    first = after[0] if after else ""
    if levels == 1:
        return [f"{path}/{name}" for name in await metadata.children(path, after=first, limit=count)]
    found = await _nodes(metadata, f"{path}/{first}", levels - 1, after[1:], count) if first else []
    names = [first]
    while names and len(found) < count:
        names = await metadata.children(path, after=first, limit=_SOME)
        for name in names:
            if len(found) == count:
                break
            found += await _nodes(metadata, f"{path}/{name}", levels - 1, [], count - len(found))
            first = name
        await asyncio.sleep(0)
    return found
