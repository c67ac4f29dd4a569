"""The journal writer of crash tests: what was not synced is lost when it is killed, as it would be by a power failure.

It runs in place of `magnetar.bookie.device.writer_process`, as a script that finds that one by its path. What was not synced
is in memory only; a sync writes pages in reverse order, so that one that is cut short leaves a torn group.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PAGE_BYTES = 4096
_REAL = Path(__file__).parents[3] / "bookie/magnetar/bookie/device/writer_process.py"


def real_writer() -> ModuleType:
    """The module of the real writer."""
    spec = importlib.util.spec_from_file_location("writer_process", _REAL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lossy_disk(plain: type) -> type:
    """A PlainDisk that loses with its process what was not synced."""

    class LossyDisk(plain):  # type: ignore[misc]
        def __init__(self, sync_data: bool) -> None:
            super().__init__(sync_data)
            self._unsynced: list[tuple[int, bytes]] = []

        def write(self, position: int, parts: "list[memoryview]") -> None:
            """In memory only."""
            self._unsynced.append((position, b"".join(parts)))

        def sync(self) -> None:
            """Writes the last page first."""
            for position, data in reversed(self._unsynced):
                for start in reversed(range(0, len(data), PAGE_BYTES)):
                    super().write(position + start, [memoryview(data)[start : start + PAGE_BYTES]])
            self._unsynced.clear()
            super().sync()

    return LossyDisk


if __name__ == "__main__":
    writer = real_writer()
    setattr(writer, "PlainDisk", lossy_disk(writer.PlainDisk))  # noqa: B010 - a module made at run time
    sys.exit(writer.main(sys.argv[1:]))
