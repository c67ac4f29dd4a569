"""Where the bookie of a data directory answers `magnetar bookie ...` while it runs: DATA/http-address (FORMATS.md).

The daemon writes it when it is ready. It may be an earlier daemon's: whoever asks there compares the instance that answers
with the cookie in the directory.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from magnetar.proto.errors import MagnetarError

from .settings import format_host

if TYPE_CHECKING:
    from magnetar.bookie import Bookie
    from magnetar.bookie.layout import DataLayout
    from magnetar.runtime.files import Files

    from .standalone import Address

_log = logging.getLogger(__name__)
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def note_http_address(bookie: Bookie, address: Address) -> None:
    """Replaces the file, durably. That it cannot be written, on a full disk say, is a warning."""
    host, port = address
    text = f"{format_host(_ANY_HOST.get(host, host))}:{port}\n"
    try:
        bookie.components.files.write_atomically(bookie.layout.http_address, text.encode())
    except MagnetarError as error:
        _log.warning(
            "`magnetar bookie ...` needs --bookie %s while this bookie runs: %s", text.strip(), error
        )


def read_http_address(files: Files, layout: DataLayout) -> str:
    """ "host:port"; "" if no daemon has written it. MagnetarError."""
    path = layout.http_address
    return files.read(path).decode(errors="replace").strip() if files.exists(path) else ""
