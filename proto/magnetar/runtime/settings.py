"""Settings: frozen data, from defaults < TOML file < environment < flags, validated once.

A section is a frozen dataclass or msgspec Struct. Units stand at the end of a name and say how text is read: `_bytes`
takes "64MB", `_s` and `_ms` take "10s" or "1h 30m"; plain numbers are in the unit of the name. Limits are msgspec metadata:

    @dataclass(frozen=True)
    class BrokerSettings:
        port: Annotated[int, Meta(ge=0, le=65535, description="native protocol")] = 7650
        tail_cache_bytes: Annotated[int, Meta(ge=1)] = 64 * MIB

    [broker]                        # magnetar.toml
    port = 7650
    MAGNETAR_BROKER_PORT=7651       # environment
    --port 7652                     # flag

A class may check combinations in `__post_init__`, raising ValueError. Every error is an InvalidSetting that names the
setting, the value, where it came from and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import logging
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec

from magnetar.proto.errors import InvalidSetting

from .quantities import format_size, parse_duration_s, parse_size

__all__ = ["Loaded", "SettingLine", "load_settings", "load_with_sources", "render_settings", "settings_lines"]

_log = logging.getLogger("magnetar.settings")
T = TypeVar("T")
_SECRET_WORDS = ("password", "secret", "token", "private_key")
_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


class Loaded(NamedTuple, Generic[T]):
    """A section with the source of each setting: "default", "FILE", "environment" or "flag"."""

    section: str
    value: T
    sources: Mapping[str, str]


class SettingLine(NamedTuple):
    """One setting as `magnetar config` shows it. Secrets are masked in `text`."""

    section: str
    name: str
    value: Any
    text: str
    source: str
    default: str
    description: str


class _Field(NamedTuple):
    name: str
    type: Any
    default: Any  # msgspec.NODEFAULT if the setting must be given
    description: str
    limits: str


def load_settings(
    cls: type[T],
    *,
    toml_path: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    section: str,
    known_sections: Collection[str] = (),
) -> T:
    """The settings of one section. Flags that are None were not given. Raises InvalidSetting."""
    return load_with_sources(
        cls,
        toml_path=toml_path,
        environment=environment,
        flags=flags,
        section=section,
        known_sections=known_sections,
    ).value


def load_with_sources(
    cls: type[T],
    *,
    toml_path: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    section: str,
    known_sections: Collection[str] = (),
) -> Loaded[T]:
    """Like `load_settings`. With `known_sections` a file with any other table is refused as well."""
    fields = {field.name: field for field in _fields(cls)}
    values: dict[str, Any] = {}
    sources = dict.fromkeys(fields, "default")
    for name, value in _from_toml(toml_path, section, known_sections).items():
        if name not in fields:
            raise InvalidSetting(
                f"unknown setting {section}.{name} in {toml_path}{_suggestion(name, fields)}", setting=name
            )
        values[name] = _convert(fields[name], value, section, f"file {toml_path}")
        sources[name] = toml_path or ""
    prefix = f"MAGNETAR_{section}_".upper().replace("-", "_")
    for variable, text in sorted((environment or {}).items()):
        if not variable.startswith(prefix):
            continue
        name = variable[len(prefix) :].lower()
        if name not in fields:
            # Not an error: orchestrators inject variables of such names (MAGNETAR_BROKER_SERVICE_HOST).
            if suggestion := _suggestion(name, fields):
                _log.warning("environment variable %s is no setting%s", variable, suggestion)
            continue
        values[name] = _convert(fields[name], text, section, f"environment variable {variable}")
        sources[name] = "environment"
    for name, value in (flags or {}).items():
        if value is None:
            continue
        if name not in fields:
            raise InvalidSetting(
                f"unknown setting {section}.{name} given as a flag{_suggestion(name, fields)}"
            )
        values[name] = _convert(fields[name], value, section, f"flag --{name.replace('_', '-')}")
        sources[name] = "flag"
    return Loaded(section, _build(cls, fields, values, section, sources), sources)


def settings_lines(loaded: Loaded[Any]) -> list[SettingLine]:
    """Every setting with its source, in the order of the class."""
    lines = []
    for field in _fields(type(loaded.value)):
        value = getattr(loaded.value, field.name)
        text = _text(field.name, value)
        if any(word in field.name for word in _SECRET_WORDS) and value:
            text = "********"
        default = "" if field.default is msgspec.NODEFAULT else _text(field.name, field.default)
        source = loaded.sources.get(field.name, "default")
        lines.append(SettingLine(loaded.section, field.name, value, text, source, default, field.description))
    return lines


def render_settings(sections: Collection[Loaded[Any]]) -> str:
    """TOML that gives these settings again, with source and description as comments."""
    parts: list[str] = []
    for loaded in sections:
        parts.append(f"[{loaded.section}]")
        lines = settings_lines(loaded)
        width = max((len(f"{line.name} = {line.text}") for line in lines), default=0)
        for line in lines:
            assignment = f"{line.name} = {line.text}"
            if line.value is None:
                assignment = f"# {line.name} is not set"
            comment = "; ".join(filter(None, (f"from {line.source}", line.description)))
            parts.append(f"{assignment.ljust(min(width, 60))}  # {comment}")
        parts.append("")
    return "\n".join(parts)


def _build(
    cls: type[T],
    fields: Mapping[str, _Field],
    values: dict[str, Any],
    section: str,
    sources: Mapping[str, str],
) -> T:
    for name, field in fields.items():
        if name not in values and field.default is msgspec.NODEFAULT:
            raise InvalidSetting(
                f"setting {section}.{name} must be given ({_allowed(field)}): as --{name.replace('_', '-')}, as "
                f"MAGNETAR_{section.upper()}_{name.upper()} or in the file",
                setting=name,
            )
    try:
        return cls(**values)
    except ValueError as error:
        given = ", ".join(f"{name} from {source}" for name, source in sources.items() if source != "default")
        raise InvalidSetting(f"settings of [{section}] contradict each other: {error} ({given})") from error


def _fields(cls: type[Any]) -> list[_Field]:
    hints = typing.get_type_hints(cls, include_extras=True)
    found = []
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            default: Any = msgspec.NODEFAULT
            if field.default is not dataclasses.MISSING:
                default = field.default
            elif field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            if field.init:
                found.append(_field(field.name, hints[field.name], default))
        return found
    for member in msgspec.structs.fields(cls):
        default = member.default
        if member.default_factory is not msgspec.NODEFAULT:
            default = member.default_factory()
        found.append(_field(member.name, hints[member.name], default))
    return found


def _field(name: str, hint: Any, default: Any) -> _Field:
    description, limits = "", []
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta):
            description = meta.description or description
            for attribute, words in (
                ("ge", "at least"),
                ("gt", "more than"),
                ("le", "at most"),
                ("lt", "less than"),
                ("min_length", "length at least"),
                ("max_length", "length at most"),
                ("pattern", "matching"),
            ):
                limit = getattr(meta, attribute)
                if limit is not None:
                    limits.append(f"{words} {limit}")
    return _Field(name, hint, default, description, ", ".join(limits))


def _from_toml(path: str | None, section: str, known_sections: Collection[str]) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise InvalidSetting(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"the settings file {path} is not TOML: {error}") from error
    for name, value in document.items():
        if known_sections and name not in known_sections:
            if not isinstance(value, dict):
                raise InvalidSetting(
                    f"{name} in {path} stands in no section; put it below one of "
                    f"{', '.join(f'[{known}]' for known in known_sections)}"
                )
            raise InvalidSetting(f"unknown section [{name}] in {path}{_suggestion(name, known_sections)}")
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise InvalidSetting(f"{section} in {path} must be a section: [{section}]")
    return {name.replace("-", "_"): value for name, value in table.items()}


def _convert(field: _Field, value: Any, section: str, source: str) -> Any:
    try:
        if isinstance(value, str):
            value = _from_text(field, value)
        return msgspec.convert(value, field.type)
    except (ValueError, msgspec.ValidationError):
        shown = "********" if any(word in field.name for word in _SECRET_WORDS) else repr(value)
        raise InvalidSetting(
            f"setting {section}.{field.name} = {shown} (from {source}) is not allowed: it must be {_allowed(field)}",
            setting=field.name,
            source=source,
        ) from None


def _from_text(field: _Field, text: str) -> Any:
    """Text of a flag, an environment variable or a quoted TOML value, read as its type and unit want it."""
    kinds = _kinds(field.type)
    if type(None) in kinds and text.strip().lower() in ("", "none"):
        return None
    if int in kinds or float in kinds:
        if field.name.endswith("_bytes"):
            return parse_size(text)
        if field.name.endswith(("_ms", "_s", "_seconds")):
            amount = parse_duration_s(text)
            if field.name.endswith("_ms"):
                # A bare number is in the unit of the name.
                amount = float(text) if text.strip().replace(".", "", 1).isdigit() else amount * 1000
            if float in kinds:
                return amount
            if amount != int(amount):
                raise ValueError(f"{text!r} is not a whole number of the unit")
            return int(amount)
        return int(text) if float not in kinds else float(text)
    if bool in kinds:
        return _WORDS.get(text.strip().lower(), text)
    if tuple in kinds or list in kinds:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _kinds(hint: Any) -> list[Any]:
    """Plain types in a hint: Annotated and unions are opened, tuple[str, ...] is tuple."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _kinds(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in _kinds(part)]
    return [origin or hint]


def _allowed(field: _Field) -> str:
    kinds = _kinds(field.type)
    if typing.Literal in kinds:
        plain = typing.get_args(field.type)[0] if hasattr(field.type, "__metadata__") else field.type
        what = "one of " + ", ".join(map(str, typing.get_args(plain)))
    elif int in kinds or float in kinds:
        if field.name.endswith("_bytes"):
            what = "a size such as 512KiB or 64MB"
        elif field.name.endswith(("_ms", "_s", "_seconds")):
            what = "a duration such as 250ms or 10s"
        else:
            what = "a whole number" if float not in kinds else "a number"
    elif bool in kinds:
        what = "true or false"
    elif tuple in kinds or list in kinds:
        what = "a list, as text separated by commas"
    elif isinstance(kinds[0], enum.EnumType):
        what = "one of " + ", ".join(str(member.value) for member in cast(type[enum.Enum], kinds[0]))
    else:
        what = "text"
    return f"{what}, {field.limits}" if field.limits else what


def _suggestion(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and name.endswith("_bytes"):
        size = format_size(value)
        return f'"{size}"' if not size.isdigit() else size
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_text("", part) for part in value) + "]"
    return msgspec.json.encode(value).decode()
