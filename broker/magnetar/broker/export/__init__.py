"""Topics as tables, the broker's side: which ledgers a topic has, leases on them, staged ledgers and their attachment."""

from .orphans import find_staged
from .requests import EXPORT_REQUESTS
from .topic_export import TopicExport

__all__ = ["EXPORT_REQUESTS", "TopicExport", "find_staged"]
