"""`magnetar config`: every setting with its value, its source and its meaning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magnetar.proto.errors import InvalidSetting
from magnetar.runtime.settings import render_settings, settings_lines

from .session import fail, print_json
from .settings import SettingSources, load_all, parse_assignment

EXIT_CONFIG = 78


def show(file: str | None, assignments: Sequence[str], *, as_json: bool) -> None:
    """As a settings file, or as JSON by section and name."""
    try:
        flags: dict[str, dict[str, Any]] = {}
        for assignment in assignments:
            section, name, value = parse_assignment(assignment)
            flags.setdefault(section, {})[name] = value
        loaded = load_all(SettingSources.of_process(flags, file))
    except InvalidSetting as error:
        fail(error.message, EXIT_CONFIG)
    if as_json:
        print_json(
            {
                section.section: {
                    line.name: {
                        "value": line.value if line.text != "********" else line.text,
                        "source": line.source,
                        "default": line.default,
                        "description": line.description,
                    }
                    for line in settings_lines(section)
                }
                for section in loaded
            }
        )
    else:
        print(render_settings(loaded), end="")
