"""The content of one simulated file: pages on the device, and pages in the cache that the device has not got.

Unsynced pages survive a power loss or not, each for itself; a page that was being written may be torn at a sector. A
page of the cache may also be written back before anybody asks for it, so versions between two syncs can survive.
"""

from __future__ import annotations

import random

PAGE_BYTES = 4096
SECTOR_BYTES = 512
_ZERO_PAGE = bytes(PAGE_BYTES)


class Inode:
    """Bytes of a file. Missing pages are zeros."""

    def __init__(self) -> None:
        self.size = 0
        self._device: dict[int, bytes] = {}
        self._device_size = 0
        self._dirty: dict[int, bytes] = {}  # to be written by the next sync
        # In the cache only, marked clean by a failed sync: never written again, and lost when the cache drops them.
        self._forgotten: dict[int, bytes] = {}

    def pages(self) -> int:
        """Pages that the file takes."""
        return (self.size + PAGE_BYTES - 1) // PAGE_BYTES

    def pages_to_add(self, offset: int, length: int) -> int:
        """Pages that a write would add."""
        return max(0, (offset + length + PAGE_BYTES - 1) // PAGE_BYTES - self.pages())

    def page(self, number: int) -> bytes:
        """A page as the running system sees it."""
        for pages in (self._dirty, self._forgotten, self._device):
            page = pages.get(number)
            if page is not None:
                return page
        return _ZERO_PAGE

    def write(self, offset: int, data: bytes) -> None:
        """Into the cache."""
        position = 0
        while position < len(data):
            number, start = divmod(offset + position, PAGE_BYTES)
            count = min(PAGE_BYTES - start, len(data) - position)
            piece = data[position : position + count]
            if count < PAGE_BYTES:
                old = self.page(number)
                piece = old[:start] + piece + old[start + count :]
            self._set(number, piece)
            position += count
        if data:
            self.size = max(self.size, offset + len(data))

    def _set(self, number: int, page: bytes) -> None:
        self._forgotten.pop(number, None)
        self._dirty.pop(number, None)  # the order of _dirty is that of the last writes
        self._dirty[number] = page

    def zero_fill(self, offset: int, length: int) -> None:
        """Into the cache."""
        first, last = -(-offset // PAGE_BYTES), (offset + length) // PAGE_BYTES
        if first >= last:
            self.write(offset, bytes(length))
            return
        self.write(offset, bytes(first * PAGE_BYTES - offset))
        for number in range(first, last):
            self._set(number, _ZERO_PAGE)
        self.size = max(self.size, last * PAGE_BYTES)
        self.write(last * PAGE_BYTES, bytes(offset + length - last * PAGE_BYTES))

    def read(self, offset: int, length: int) -> bytes:
        """Short at the end of the file."""
        end = min(offset + length, self.size)
        if end <= offset:
            return b""
        first = offset // PAGE_BYTES
        data = b"".join(self.page(number) for number in range(first, (end - 1) // PAGE_BYTES + 1))
        return data[offset - first * PAGE_BYTES : end - first * PAGE_BYTES]

    def truncate(self, size: int) -> None:
        """In the cache: after a power loss the old size may be back."""
        if size < self.size:
            last, keep = divmod(size, PAGE_BYTES)
            for number in range(last, self.pages()):
                survivors = self.page(number)[:keep] if number == last else b""
                self._set(number, survivors + bytes(PAGE_BYTES - len(survivors)))
        self.size = size

    def sync(self) -> None:
        """All of it is on the device."""
        self._device.update(self._dirty)
        self._dirty.clear()
        self._device_size = self.size

    def sync_failed(self, rng: random.Random) -> None:
        """The pages count as clean although the device has not got them: at least one of them; any other may be there."""
        fails = rng.randrange(len(self._dirty)) if self._dirty else 0
        for position, (number, page) in enumerate(self._dirty.items()):
            if position != fails and rng.random() < 0.5:
                self._device[number] = page
                self._forgotten.pop(number, None)
            else:
                self._forgotten[number] = page
        self._dirty.clear()

    def drop_clean(self, offset: int, length: int) -> None:
        """The cache forgets what counts as clean: what a failed sync has lost is seen to be lost."""
        if self._forgotten:
            for number in range(offset // PAGE_BYTES, -(-(offset + length) // PAGE_BYTES)):
                self._forgotten.pop(number, None)

    def write_back_some(self, rng: random.Random) -> None:
        """The kernel writes some pages of its own accord."""
        for number in list(self._dirty):
            if rng.random() < 0.5:
                self._device[number] = self._dirty[number]  # stays dirty: harmless, and the sync is still due
                self._device_size = max(self._device_size, min(self.size, (number + 1) * PAGE_BYTES))

    def flip(self, offset: int, bit: int) -> None:
        """Damages a bit everywhere."""
        number, start = divmod(offset, PAGE_BYTES)
        for pages in (self._dirty, self._forgotten, self._device):
            page = pages.get(number)
            if page is not None:
                damaged = bytearray(page)
                damaged[start] ^= 1 << bit
                pages[number] = bytes(damaged)

    def lose_power(self, rng: random.Random) -> int:
        """Decides what survives a power loss; returns the number of pages that did not, or not whole."""
        lost = 0
        keep_chance = rng.choice((0.0, 0.5, 0.9, 1.0))
        size = self._device_size
        for number, page in self._dirty.items():
            old = self._device.get(number, _ZERO_PAGE)
            fate = rng.random()
            if fate < keep_chance:
                survivor = page
            elif fate < keep_chance + 0.2 and page != old:
                survivor = _torn(old, page, rng)
            else:
                survivor = old
            lost += survivor != page
            if survivor is not old:
                self._device[number] = survivor
                size = max(size, min(self.size, (number + 1) * PAGE_BYTES))
        # The size is metadata of its own: the new one may be there without the pages, which then read as zeros.
        self._device_size = rng.choice((size, size, self.size)) if self.size > size else size
        if self.size < size and rng.random() < 0.5:
            self._device_size = self.size  # a truncation that made it
        lost += len(self._forgotten)
        self._dirty.clear()
        self._forgotten.clear()
        self.size = self._device_size
        for number in [n for n in self._device if n * PAGE_BYTES >= self.size]:
            del self._device[number]
        return lost


def _torn(old: bytes, new: bytes, rng: random.Random) -> bytes:
    """A page of which only some sectors were written, in any order."""
    return b"".join(
        (new if rng.random() < 0.5 else old)[start : start + SECTOR_BYTES]
        for start in range(0, PAGE_BYTES, SECTOR_BYTES)
    )
