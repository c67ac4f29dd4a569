"""Names that people give to daemons, racks and zones: each is a node of the metadata, and shown in tables."""

from __future__ import annotations

from .errors import InvalidSetting

_MAX_CHARACTERS = 255


def require_plain_name(setting: str, name: str) -> None:
    """Raises InvalidSetting, which begins with `setting`. The empty name is plain."""
    if name != name.strip() or not name.isprintable() or "/" in name or len(name) > _MAX_CHARACTERS:
        raise InvalidSetting(
            f"{setting} is {name!r:.300}; it must be a plain name of {_MAX_CHARACTERS} characters at most: no slash, no "
            "space around it"
        )
