"""`magnetar config`: every setting with its value, its source and its meaning."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any

import msgspec
import typer

from magnetar.runtime.quantities import format_size
from magnetar.runtime.settings import MASK, SECRET, UNIT, Loaded, setting_fields

from ..terminal.command import Answer, command
from ..wiring.settings import SettingSources, load_all

config_app = typer.Typer()


@command(config_app, "config", "Operate")
async def config(
    file: Annotated[str | None, typer.Option("--config", help="Settings in TOML.", metavar="FILE")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="As a daemon takes it.", metavar="SECTION.NAME=VALUE")
    ] = None,
) -> Answer:
    """Show every setting, its value and where it comes from; the output is a settings file."""
    loaded = load_all(SettingSources.of_options(None, file, assignments))
    described = {section.section: describe_settings(section) for section in loaded}
    return Answer(described, [render_settings(loaded)])


def describe_settings(loaded: Loaded[Any]) -> dict[str, dict[str, Any]]:
    """For each setting, in the order of the class: "value" (masked if secret), "source", "default" and "description"."""
    described = {}
    for name, field in setting_fields(type(loaded.value)).items():
        value = getattr(loaded.value, name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        described[name] = {
            "value": MASK if value and SECRET.search(name) else value,
            "source": loaded.sources[name],
            "default": "" if field.required else _text(name, default),
            "description": (getattr(field.type, "extra_json_schema", None) or {}).get("description", ""),
        }
    return described


def render_settings(sections: Collection[Loaded[Any]]) -> str:
    """TOML that gives these settings again, with source and description as comments."""
    lines: list[str] = []
    for loaded in sections:
        lines.append(f"[{loaded.section}]")
        for name, setting in describe_settings(loaded).items():
            value, comment = setting["value"], f"from {setting['source']}"
            assignment = f"# {name} is not set" if value is None else f"{name} = {_text(name, value)}"
            comment += f"; {setting['description']}" if setting["description"] else ""
            lines.append(f"{assignment:<40}  # {comment}")
        lines.append("")
    return "\n".join(lines[:-1])


def _text(name: str, value: Any) -> str:
    unit = UNIT.search(name)
    if unit and unit[1] == "bytes" and not (size := format_size(value)).isdigit():
        return f'"{size}"'
    return json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
