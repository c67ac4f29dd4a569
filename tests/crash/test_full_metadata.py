"""Rule 39: the embedded metadata store on a full disk: it refuses changes at last, ends nothing, and can be opened."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.storage_small_disk import SmallDisk

pytestmark = pytest.mark.real


# Commits until the disk refuses; then everything is read, the store is opened again while the disk is full, and read again.
CHILD = """
import asyncio, os, sys
from magnetar.metadata.embedded import EmbeddedMetadataStore
from magnetar.proto.errors import DiskFull

async def main():
    store = EmbeddedMetadataStore(sys.argv[1] + "/metadata")
    lost = []
    store.on_failure = lost.append
    await store.create("/before", b"x")
    print("ready", flush=True)
    sys.stdin.readline()  # it is full
    made = 0
    try:
        while made < 100_000:
            await store.create(f"/n/{made:06}", bytes(4000))
            made += 1
    except DiskFull as error:
        print("refused", error.message, flush=True)
    assert made > 500, made  # trimming and deletions go on for long
    for turn in range(2):
        await asyncio.sleep(0)
        assert len(await store.children("/n")) == made
        assert not lost
        if not turn:
            await store.close()
            store = EmbeddedMetadataStore(sys.argv[1] + "/metadata")
    print("made", made, flush=True)
    sys.stdin.readline()  # there is room again
    for number in range(made, made + 1_000):
        await store.create(f"/n/{number:06}", bytes(4000))
    assert len(await store.children("/n")) == made + 1_000
    await store.close()
    print("end", flush=True)

asyncio.run(main())
"""


def test_rule_39_a_full_disk_refuses_changes_and_the_store_opens_and_goes_on(tmp_path: Path) -> None:
    with SmallDisk.make(tmp_path, 96) as disk:
        child = subprocess.Popen(
            [*disk.inside, sys.executable, "-c", CHILD, disk.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            disk.fill(leave_bytes=0)
            child.stdin.write("\n")
            child.stdin.flush()
            assert "no space left" in child.stdout.readline()
            assert child.stdout.readline().startswith("made ")
            disk.free()
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "end\n"
            assert child.wait(timeout=60) == 0
        finally:
            child.kill()
            child.communicate()
