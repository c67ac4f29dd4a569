"""Services that the command line knows by name, and which one it talks to: a file of the user.

`--url` comes first, then MAGNETAR_URL, then the context in use, then the service of this machine.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from magnetar.proto.errors import InvalidArgument

LOCAL_URL = "magnetar://127.0.0.1:7650"


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A service."""

    url: str


class Contexts(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file. `current`: "" is none."""

    current: str = ""
    contexts: dict[str, Context] = {}

    @classmethod
    def load(cls) -> Contexts:
        """Empty where there is no file. Raises InvalidArgument for a damaged one."""
        path = contexts_path()
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidArgument(
                f"{path} cannot be read: {error}; mend or delete it (it has the contexts of `magnetar context`)"
            ) from None

    def save(self) -> None:
        """Replaces the file as a whole."""
        path = contexts_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        try:
            beside.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
            beside.replace(path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                beside.unlink()

    def get(self, name: str) -> Context:
        """Raises InvalidArgument."""
        if name not in self.contexts:
            known = ", ".join(sorted(self.contexts)) or "none"
            raise InvalidArgument(f"there is no context {name!r}; there are: {known} (magnetar context add)")
        return self.contexts[name]

    @property
    def url(self) -> str:
        """Of the context in use, or of this machine."""
        return self.get(self.current).url if self.current else LOCAL_URL


def contexts_path() -> Path:
    """MAGNETAR_CONTEXTS, or magnetar/contexts.json where the user's settings are."""
    if own := os.environ.get("MAGNETAR_CONTEXTS"):
        return Path(own)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "magnetar" / "contexts.json"
