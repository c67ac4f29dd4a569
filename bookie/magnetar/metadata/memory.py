"""Metadata in memory, for tests and the simulation: the same tree as the embedded store, on a model of its storage.

>>> disk = ModelKeyValue()
>>> store = MemoryMetadataStore(disk)     # crash: drop it, and open the next one on the same disk
>>> successor = MemoryMetadataStore(disk)
"""

from __future__ import annotations

from .key_value import ModelKeyValue
from .local import LocalMetadataStore


class MemoryMetadataStore(LocalMetadataStore):
    """Synced writes survive in `disk`; a store that was opened earlier on the same disk is shut out."""

    def __init__(self, disk: ModelKeyValue | None = None, *, grouped: bool = True) -> None:
        """`grouped`: see LocalMetadataStore."""
        super().__init__((ModelKeyValue() if disk is None else disk).open(), grouped=grouped)
