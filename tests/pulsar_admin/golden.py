"""What a command of pulsar-admin did to a real Pulsar, as `exchanges.jsonl` keeps it, and what differs at another service.

A row: `command`; `http`, its exchanges: method, path, body, status, and the fields of the answer (`fields`); `printed`: JSON
as it is, the lines of a text, or that it failed; `exit`: the exit code of its own process. A line that begins with "!" is
what programs do meanwhile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("exchanges.jsonl")
FAILED = "it failed, for the reason that was answered"
_MOST_CHARACTERS = 8_000  # of what was printed, and is compared by value
_OF_ONE_IMPLEMENTATION = re.compile(
    "/configuration/runtime|/broker-stats/[mt]"
)  # of whose answers only the kind counts
_LOGGED = re.compile(r"^\d{4}-\d\d-\d\dT\S+ \[.*$\n?", re.MULTILINE)
# What is of one run alone, in what was printed and asked.
_OF_THE_RUN = (
    (re.compile(r"\b(localhost|127\.0\.0\.1):\d+"), "HOST"),
    (re.compile(r"\b(pulsar|magnetar)://HOST"), "pulsar://HOST"),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)"), "TIME"),
    (re.compile(r"(?<=/resetcursor/)\d+"), "TIME"),
    (re.compile(r"/tmp/[^\s\"',]*"), "FOLDER"),
    (re.compile(r"(?<![\w.:])-?\d+:-?\d+(:-?\d+)*\b"), "ID"),
    (re.compile(r"(?<=^Publish time: )\d+", re.MULTILINE), "TIME"),
    (re.compile(r"(PulsarAdminException\$\w+): .*"), r"\1: REASON"),  # each has its own words
)
# Fields of answers whose values are.
_VALUES_OF_THE_RUN = re.compile(
    r"Throughput|Counter|AgeSeconds|Timestamp|Time\b|Id\b|Date\b|InBytes|Position|Ledger|ledgers|address|producerName|consumerName|[sS]ize|lastConfirmedEntry|connectedSince|clientVersion|ownerBroker|version|avgMessages|messageAckRate|averageMsgSize|msgRate"
)


def rows() -> list[dict[str, Any]]:
    """Of Pulsar, in the order in which they were recorded."""
    return [json.loads(line) for line in _FILE.read_text().splitlines()]


def row(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Of what `shell.Recorder` noted, what is kept."""
    return {
        "command": raw["command"],
        "http": [
            [one["method"], masked(one["path"]), _sorted(one["body"]), one["status"],
             answered(one["path"], one["answer"]) if one["status"] < 300 else None]
            for one in raw["http"]
        ],
        "printed": printed(raw["seen"]),
        **({} if raw["exit"] is None else {"exit": raw["exit"]}),
    }  # fmt: skip


def answered(path: str, answer: Any) -> Any:
    """What is kept of an answer."""
    if _OF_ONE_IMPLEMENTATION.search(path):
        return {} if isinstance(answer, dict) else []
    return fields(answer)


def write(raws: list[dict[str, Any]]) -> None:
    """The recorded ones."""
    _FILE.write_text("".join(json.dumps(row(raw), separators=(",", ":")) + "\n" for raw in raws))


def masked(text: str) -> str:
    """Without what is of one run.

    >>> masked("http://localhost:28080 at 2026-01-01T00:00:00.5Z wrote 7:0:-1")
    'http://HOST at TIME wrote ID'
    """
    for pattern, name in _OF_THE_RUN:
        text = pattern.sub(name, text)
    return text


def printed(text: str) -> Any:
    """As it is compared."""
    text = masked(_LOGGED.sub("", text.removesuffix("Goodbye!"))).strip()
    if re.search(r"^Reason: ", text, re.MULTILINE):
        return FAILED
    try:
        found = json.loads(text)
    except ValueError:
        found = text.splitlines()
    return _sorted(found) if len(text) < _MOST_CHARACTERS else fields(found)


def _sorted(found: Any) -> Any:
    """JSON whose lists of texts, and texts such as "[produce, consume]", are sorted: they are sets."""
    if isinstance(found, dict):
        return {name: _sorted(one) for name, one in found.items()}
    if isinstance(found, list):
        every = [_sorted(one) for one in found]
        return sorted(every) if all(isinstance(one, str) and " " not in one for one in every) else every
    if isinstance(found, str):
        return re.sub(r"\[(\w+(, \w+)+)\]", lambda both: f"[{', '.join(sorted(both[1].split(', ')))}]", found)
    return found


def fields(answer: Any) -> Any:
    """What an answer is made of: maps with the fields of each name, of lists the first element, of the rest the type.

    >>> fields({"a": [1, 2], "b": None}) == {"a": ["number"], "b": "null"}
    True
    """
    if isinstance(answer, dict):
        return {masked(name): fields(one) for name, one in answer.items()}
    if isinstance(answer, list):
        return [fields(one) for one in answer[:1]]
    if answer is None:
        return "null"
    if isinstance(answer, bool):
        return "bool"
    return "number" if isinstance(answer, int | float) else "text"


def differences(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Of `fields`, in words; empty: none. An empty list or map fits any."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        missing = [f"{path}.{name} is missing" for name in wanted if name not in found]
        more = [f"{path}.{name} is more" for name in found if name not in wanted]
        both = [
            one
            for name in wanted
            if name in found
            for one in differences(wanted[name], found[name], f"{path}.{name}")
        ]
        return missing + more + both
    if isinstance(wanted, list) and isinstance(found, list):
        return differences(wanted[0], found[0], f"{path}[]") if wanted and found else []
    return [] if wanted == found else [f"{path} is {found}, not {wanted}"]


def _values(wanted: Any, found: Any, path: str) -> list[str]:
    """Of what was printed: as `differences`, and values that are not of one run are the same."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return differences(dict.fromkeys(wanted, 0), dict.fromkeys(found, 0), path) + [
            one
            for name in wanted
            if name in found
            for one in _values(wanted[name], found[name], f"{path}.{name}")
        ]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return [
            one
            for number, both in enumerate(zip(wanted, found, strict=True))
            for one in _values(*both, f"{path}[{number}]")
        ]
    if _VALUES_OF_THE_RUN.search(path) and fields(wanted) == fields(found):
        return []
    return [] if wanted == found else [f"{path} is {found!r}, not {wanted!r}"]


def exchanged(request: str, status: int, answer: Any, found_status: int, found: Any, said: Any) -> list[str]:
    """What differs in an exchange; `answer` and `found`: fields; `said`: of an error."""
    if status != found_status:
        return [f"status: {found_status}, not {status}, of {request}: {said}"]
    return [f"answer{one}" for one in differences(answer, found)] if status < 300 else []


def compared(golden: Mapping[str, Any], raw: Mapping[str, Any]) -> list[str]:
    """What differs in `raw`, as `shell.Recorder` noted it, in words."""
    found = row(raw)
    wanted, asked = (
        sorted(golden["http"], key=str),
        sorted(found["http"], key=str),
    )  # some are asked side by side
    differ = []
    if [one[:3] for one in wanted] != [one[:3] for one in asked]:
        differ.append(f"requests: {[one[:3] for one in asked]}, not {[one[:3] for one in wanted]}")
    for (method, path, _, status, answer), other in zip(wanted, asked, strict=False):
        reasons = [one["answer"] for one in raw["http"] if one["status"] == other[3] >= 300]
        differ += exchanged(f"{method} {path}", status, answer, other[3], other[4], reasons)
    reason = raw["http"][-1]["answer"] if raw["http"] else None
    if (
        found["printed"] == FAILED
        and isinstance(reason, dict)
        and reason.get("reason", "") not in raw["seen"]
    ):
        differ.append(f"printed: another reason than {reason}: {raw['seen']}")
    differ += [f"printed{text}" for text in _values(golden["printed"], found["printed"], "")]
    if golden.get("exit") != found.get("exit"):
        differ.append(f"exit code: {found.get('exit')}, not {golden.get('exit')}")
    return differ
