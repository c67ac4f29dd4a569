"""Paths of the interface and paths in ZooKeeper.

A store lives below a root. A name may have any character but the slash and control characters; ZooKeeper refuses some
more: DEL and what follows it, private ones, and all that need two units of UTF-16, such as the letters of rarer
scripts. Those, and the percent sign, are percent-encoded as UTF-8:

    /topics/100%/𠀀   is   /root/topics/100%25/%F0%A0%80%80
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

# PathUtils.validatePath, and the percent sign.
ENCODED = re.compile("[%\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Namespace:
    """The root below which a store lives, and whether its nodes are for its own user only."""

    root: str
    private: bool

    def full(self, path: str) -> str:
        """ZooKeeper's path of a path that was checked."""
        if ENCODED.search(path) is not None:
            path = ENCODED.sub(lambda found: quote(found[0], safe=""), path)
        return self.root + path if path != "/" else self.root or "/"

    def relative(self, full: str) -> str:
        """The reverse."""
        return self.name(full[len(self.root) :]) or "/"

    def name(self, name: str) -> str:
        """Of a child as ZooKeeper lists it."""
        return unquote(name) if "%" in name else name
