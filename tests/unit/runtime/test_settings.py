"""Settings: which source wins, what is refused, and what the error says."""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import pytest
from msgspec import Meta

from magnetar.cli.commands.config import describe_settings, render_settings
from magnetar.proto.errors import InvalidSetting
from magnetar.runtime.quantities import format_size, parse_duration, parse_size
from magnetar.runtime.settings import load_settings

T = TypeVar("T")


class Mode(enum.Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True)
class Example:
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="native protocol")] = 7650
    cache_bytes: Annotated[int, Meta(ge=1)] = 64 * 1024 * 1024
    scrub_bytes_per_s: int = 0
    drain_s: float = 10.0
    linger_ms: int = 1
    tls: bool = False
    bookies: tuple[str, ...] = ()
    token: str | None = None
    level: Literal["info", "debug"] = "info"
    mode: Mode = Mode.SAFE

    def __post_init__(self) -> None:
        if self.tls and self.token is None:
            raise ValueError("tls needs token")


class Struct(msgspec.Struct, frozen=True):
    needed: int
    names: list[str] = msgspec.field(default_factory=list)


def load(cls: type[T], **arguments: Any) -> T:
    return load_settings(cls, **arguments).value


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "magnetar.toml"
    path.write_text(text)
    return str(path)


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[broker]\nport = 1\ncache_bytes = "1MiB"\ndrain_s = "1m"\nhost = "file"\n')
    loaded = load_settings(
        Example,
        toml_path=path,
        environment={"MAGNETAR_BROKER_PORT": "2", "MAGNETAR_BROKER_CACHE_BYTES": "2MB", "PATH": "x"},
        flags={"port": 3, "host": None},
        section="broker",
    )
    assert loaded.value == Example(host="file", port=3, cache_bytes=2_000_000, drain_s=60.0)
    assert loaded.sources["port"] == "flag"
    assert loaded.sources["cache_bytes"] == "environment"
    assert loaded.sources["host"] == path
    assert loaded.sources["tls"] == "default"
    assert load(Example, section="broker") == Example()


def test_whatever_is_given_beats_what_follows_from_other_settings(tmp_path: Path) -> None:
    loaded = load_settings(
        Example,
        toml_path=write(tmp_path, "[broker]\nport = 1\n"),
        environment={"MAGNETAR_BROKER_HOST": "environment"},
        derived={"port": 2, "host": "derived", "linger_ms": 7},
        section="broker",
    )
    assert loaded.value == Example(host="environment", port=1, linger_ms=7)
    assert loaded.sources["linger_ms"] == "derived"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("TLS", "no", False),
        ("BOOKIES", "a:1, b:2", ("a:1", "b:2")),
        ("TOKEN", "none", None),
        ("LINGER_MS", "2s", 2000),
        ("LINGER_MS", "5", 5),
        ("DRAIN_S", "250ms", 0.25),
        ("DRAIN_S", "7", 7.0),
        ("LEVEL", "debug", "debug"),
        ("MODE", "fast", Mode.FAST),
        ("CACHE_BYTES", "512", 512),
        ("SCRUB_BYTES_PER_S", "64MiB", 64 << 20),
    ],
)
def test_text_is_read_as_its_type_and_unit(name: str, text: str, value: Any) -> None:
    settings = load(Example, environment={f"MAGNETAR_X_{name}": text}, section="x")
    assert getattr(settings, name.lower()) == value


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PORT": "http"}, ["x.port = 'http'", "environment variable MAGNETAR_X_PORT", "a whole number"]),
        ({"PORT": "70000"}, ["at least 0, at most 65535"]),
        ({"CACHE_BYTES": "64 parrots"}, ["a size such as 512KiB or 64MB"]),
        ({"SCRUB_BYTES_PER_S": "2s"}, ["a size such as"]),
        ({"DRAIN_S": "soon"}, ["a duration such as"]),
        ({"LINGER_MS": "1us"}, ["a duration such as"]),
        ({"TLS": "maybe"}, ["true or false"]),
        ({"LEVEL": "loud"}, ["one of debug, info"]),
        ({"MODE": "odd"}, ["one of fast, safe"]),
        ({"TLS": "yes"}, ["[x] contradict each other: tls needs token", "tls from environment"]),
    ],
)
def test_an_error_names_setting_value_source_and_what_is_allowed(
    environment: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load(
            Example,
            environment={f"MAGNETAR_X_{name}": text for name, text in environment.items()},
            section="x",
        )
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[broker]\nprot = 1", "unknown setting broker.prot .*did you mean port"),
        ("[brokr]\nport = 1", r"unknown section \[brokr\] .*did you mean broker"),
        ("broker = 1", "must be a section"),
        ("port = 1", r"port in .* stands in no section; put it below one of \[broker\], \[bookie\]"),
        ("[broker\n", "is not TOML"),
        ("[broker]\nport = true", "port = True .*file .*whole number"),
        ("[broker]\nhost = 5", "host = 5"),
    ],
)
def test_files_are_checked(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        load(Example, toml_path=write(tmp_path, text), section="broker", known_sections=["broker", "bookie"])


def test_a_missing_file_and_a_missing_setting() -> None:
    with pytest.raises(InvalidSetting, match="cannot read the settings file /nowhere"):
        load(Example, toml_path="/nowhere.toml", section="x")
    with pytest.raises(InvalidSetting, match=r"x\.needed must be given .* --needed.* MAGNETAR_X_NEEDED"):
        load(Struct, section="x")
    assert load(Struct, flags={"needed": "4", "names": "a,b"}, section="x") == Struct(4, ["a", "b"])
    with pytest.raises(InvalidSetting, match="did you mean needed"):
        load(Struct, flags={"neded": 4}, section="x")


def test_a_near_miss_in_the_environment_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    load(Example, environment={"MAGNETAR_X_PROT": "1", "MAGNETAR_X_SERVICE_UID": "10.0.0.1"}, section="x")
    assert [record.getMessage() for record in caplog.records] == [
        "environment variable MAGNETAR_X_PROT is no setting; did you mean port?"
    ]


def test_what_is_rendered_gives_the_same_settings_again(tmp_path: Path) -> None:
    loaded = load_settings(
        Example,
        flags={"port": 9, "scrub_bytes_per_s": "2MiB", "bookies": "a,b", "host": 'quo"te', "mode": "fast"},
        section="broker",
    )
    text = render_settings([loaded])
    assert "from flag; native protocol" in text
    again = load(Example, toml_path=write(tmp_path, text), section="broker")
    assert again == loaded.value


def test_secrets_are_never_shown() -> None:
    loaded = load_settings(Example, flags={"token": "hunter2"}, section="x")
    assert "hunter2" not in render_settings([loaded])
    assert describe_settings(loaded)["token"]["value"] == "********"


def test_sizes_and_durations() -> None:
    assert [parse_size(text) for text in ("1k", "1 KB", "1.5GiB", "7")] == [1024, 1000, 1610612736, 7]
    assert [parse_duration(text, "s") for text in ("1h 30m", "2d", "500ms", "3")] == [5400, 172800, 0.5, 3]
    for text in ("", "MB", "-1", "1 parrot", "1e3"):
        with pytest.raises(ValueError, match="not a size"):
            parse_size(text)
        with pytest.raises(ValueError, match="not a duration"):
            parse_duration(text, "s")
    for count in (1, 1000, 1024, 64 << 20, 3 << 40):
        assert parse_size(format_size(count)) == count
