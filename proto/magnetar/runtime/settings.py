"""Settings: frozen data, from defaults < TOML file < environment < flags, validated once, by msgspec.

A section is a frozen dataclass or msgspec Struct. The unit at the end of a name says how text is read: `_bytes` and
`_bytes_per_s` take "64MB", `_s` and `_ms` take "1h 30m"; plain numbers are in that unit. Limits are msgspec metadata:

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

import contextlib
import difflib
import logging
import re
import tomllib
from collections.abc import Collection, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from magnetar.proto.errors import InvalidSetting

from .quantities import parse_duration, parse_size

_log = logging.getLogger("magnetar.settings")
T = TypeVar("T")
MASK = "********"  # is shown in place of a setting whose name has one of these words
SECRET = re.compile("password|secret|token|private_key")
UNIT = re.compile("_(bytes|ms|s)(_per_s)?$")
_BOOLEANS = dict.fromkeys("true yes on 1".split(), True) | dict.fromkeys("false no off 0".split(), False)
_NUMBERS, _LISTS = {"IntType", "FloatType"}, {"ListType", "VarTupleType"}  # as msgspec calls the types
_WORDS = {"IntType": "a whole number", "FloatType": "a number", "BoolType": "true or false",
          **dict.fromkeys(_LISTS, "a list, as text separated by commas")}  # fmt: skip
_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than",
           "min_length": "length at least", "max_length": "length at most", "pattern": "matching"}  # fmt: skip
# How an error of msgspec names the setting that is wrong or missing.
_NAMED = re.compile(r"(?:at `\$\.|missing required field `)(\w+)")


class Loaded(NamedTuple, Generic[T]):
    """A section with the source of each setting: "default", "derived", the file's path, "environment" or "flag"."""

    section: str
    value: T
    sources: Mapping[str, str]


def load_settings(
    cls: type[T],
    *,
    section: str,
    toml_path: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    derived: Mapping[str, Any] | None = None,
    known_sections: Collection[str] = (),
) -> Loaded[T]:
    """One section. `derived` are defaults that follow from other settings; flags that are None were not given.

    With `known_sections` a file with any other table is refused. Raises InvalidSetting.
    """
    fields = setting_fields(cls)
    prefix = f"MAGNETAR_{section}_".upper().replace("-", "_")
    layers = [("derived", "other settings", dict(derived or {}))]
    if toml_path is not None:
        layers.append((toml_path, f"file {toml_path}", _from_toml(toml_path, section, known_sections)))
    for variable, text in (environment or {}).items():
        name = variable.removeprefix(prefix).lower()
        if variable.startswith(prefix) and name in fields:
            layers.append(("environment", f"environment variable {variable}", {name: text}))
        elif variable.startswith(prefix) and (hint := _suggestion(name, fields)):
            # Not an error: orchestrators inject variables of such names (MAGNETAR_BROKER_SERVICE_HOST).
            _log.warning("environment variable %s is no setting%s", variable, hint)
    for name, value in (flags or {}).items():
        layers.append(("flag", f"flag --{name.replace('_', '-')}", {} if value is None else {name: value}))
    values: dict[str, Any] = {}
    sources, places = dict.fromkeys(fields, "default"), {}
    for source, place, layer in layers:
        for name, value in layer.items():
            if name not in fields:
                hint = _suggestion(name, fields)
                raise InvalidSetting(f"unknown setting {section}.{name} (from {place}){hint}", setting=name)
            values[name] = _from_text(fields[name], value) if isinstance(value, str) else value
            sources[name], places[name] = source, place
    try:
        return Loaded(section, msgspec.convert(values, cls), sources)
    except msgspec.ValidationError as error:
        named = _NAMED.search(str(error))
        if named is None or error.__cause__ is not None:  # __post_init__ raised
            given = ", ".join(f"{name} from {sources[name]}" for name in values)
            problem = f"settings of [{section}] contradict each other: {error} ({given})"
            raise InvalidSetting(problem) from error
        name, allowed = named[1], _allowed(fields[named[1]])
        if name in values:
            shown = MASK if SECRET.search(name) else repr(values[name])
            problem = f"= {shown} (from {places[name]}) is not allowed: it must be {allowed}"
        else:
            problem = f"must be given ({allowed}): as --{name.replace('_', '-')}, as {prefix}{name.upper()} or in the file"
        raise InvalidSetting(f"setting {section}.{name} {problem}", setting=name) from None


def setting_fields(cls: type[Any]) -> dict[str, inspect.Field]:
    """What msgspec knows of each setting of a section, in the order of the class."""
    return {field.name: field for field in inspect.type_info(cls).fields}  # type: ignore[attr-defined]


def _from_toml(path: str, section: str, known_sections: Collection[str]) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise InvalidSetting(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"the settings file {path} is not TOML: {error}") from error
    for name in document if known_sections else ():
        if not isinstance(document[name], dict) and name not in known_sections:
            known = ", ".join(f"[{known}]" for known in known_sections)
            raise InvalidSetting(f"{name} in {path} stands in no section; put it below one of {known}")
        if name not in known_sections:
            raise InvalidSetting(f"unknown section [{name}] in {path}{_suggestion(name, known_sections)}")
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise InvalidSetting(f"{section} in {path} must be a section: [{section}]")
    return {name.replace("-", "_"): value for name, value in table.items()}


def _kinds(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    kind = kind.type if isinstance(kind, inspect.Metadata) else kind  # Annotated
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _from_text(field: inspect.Field, text: str) -> Any:
    """Text as its type and unit want it; what cannot be read so stays text, which msgspec refuses."""
    kinds, plain = {type(kind).__name__ for kind in _kinds(field.type)}, text.strip().lower()
    if "NoneType" in kinds and plain in ("", "none"):
        return None
    if "BoolType" in kinds:
        return _BOOLEANS.get(plain, text)
    if kinds & _LISTS:
        return [part.strip() for part in text.split(",") if part.strip()]
    with contextlib.suppress(ValueError):
        if unit := UNIT.search(field.name):
            # No limit, of the few that may have none; the others refuse it, as they do from a file.
            if plain == "-1":
                return -1
            amount = parse_size(text) if unit[1] == "bytes" else parse_duration(text, unit[1])
            return int(amount) if "IntType" in kinds and amount == int(amount) else amount
        if kinds & _NUMBERS:
            return int(text) if "IntType" in kinds else float(text)
    return text


def _allowed(field: inspect.Field) -> str:
    kind, unit = _kinds(field.type)[0], UNIT.search(field.name)
    if unit is not None:
        what = "a size such as 512KiB or 64MB" if unit[1] == "bytes" else "a duration such as 250ms or 10s"
    elif isinstance(kind, inspect.LiteralType):
        what = "one of " + ", ".join(map(str, kind.values))
    elif isinstance(kind, inspect.EnumType):
        what = "one of " + ", ".join(str(member.value) for member in kind.cls)
    else:
        what = _WORDS.get(type(kind).__name__, "text")
    limits = [(words, getattr(kind, name, None)) for name, words in _LIMITS.items()]
    return ", ".join([what, *(f"{words} {limit}" for words, limit in limits if limit is not None)])


def _suggestion(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
