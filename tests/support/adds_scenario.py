"""Runs the text scenarios of `ledger.core.outstanding_adds` (tests/scenarios/adds_*.txt).

    way limit=300
    ----
    = 0 bytes, last tick: nothing is outstanding

Commands: way limit=BYTES, begins empty; ready, not-ready: whether the bookie can take adds; add LEDGER ENTRY...
[deferred]; answered, accepted LEDGER ENTRY...; force LEDGER; send-held [COUNT]; heard; tick [COUNT]; fail. Entries have 100
bytes. `check()` runs after every command. The last line: the bytes outstanding, and what the last tick found.
"""

from __future__ import annotations

from magnetar.ledger.core.outstanding_adds import AddOutcome, OutstandingAdds, Waited
from support.text_scenarios import play

ENTRY = bytes(100)


def run_scenario(text: str) -> str:
    """The text with the output parts as the core produces them."""
    return play(text, _Way().run)


class _Way:
    def __init__(self) -> None:
        self.adds = OutstandingAdds(0)
        self.ready = True
        self.waited = Waited.FOR_NOTHING
        self.heard: list[str] = []

    def run(self, line: str) -> list[str]:
        name, *arguments = line.split()
        self.heard = []
        lines = self.carry_out(name, arguments)
        self.adds.check()
        return [*lines, *self.heard, f"= {self.adds.outstanding_bytes} bytes, last tick: {self.waited.value}"]

    def carry_out(self, name: str, arguments: list[str]) -> list[str]:
        match name:
            case "way":
                self.adds = OutstandingAdds(int(arguments[0].removeprefix("limit=")))
                return []
            case "ready" | "not-ready":
                self.ready = name == "ready"
                return []
            case "add":
                deferred = arguments[-1] == "deferred"
                ledger_id, *entries = (int(number) for number in arguments[: -1 if deferred else None])
                return [self.add(ledger_id, entry_id, deferred) for entry_id in entries]
            case "answered" | "accepted":
                ledger_id, *entries = map(int, arguments)
                return [self.answer(name, ledger_id, entry_id) for entry_id in entries]
            case "force":
                return ["force it" if self.adds.force(int(arguments[0])) else "nothing to force"]
            case "send-held":
                return self.send_held(int(arguments[0]) if arguments else 1000)
            case "heard":
                self.adds.heard()
                return []
            case "tick":
                for _ in range(int(arguments[0]) if arguments else 1):
                    self.waited = self.adds.tick()
                return []
            case "fail":
                return [f"fail {ledger_id}:{entry_id}" for ledger_id, entry_id, _ in self.adds.fail()]
            case _:
                raise AssertionError(f"unknown command: {name}")

    def add(self, ledger_id: int, entry_id: int, deferred: bool) -> str:
        outcome = self.adds.add(ledger_id, entry_id, ENTRY, self.note, deferred=deferred, ready=self.ready)
        what = {AddOutcome.SEND: "send", AddOutcome.TAKEN: "take", AddOutcome.REFUSED: "refuse"}[outcome]
        return f"{what} {ledger_id}:{entry_id}"

    def note(self, bookie: str, ledger_id: int, entry_id: int, code: int) -> None:
        self.heard.append(f"call back {ledger_id}:{entry_id}")

    def answer(self, name: str, ledger_id: int, entry_id: int) -> str:
        find = self.adds.answered if name == "answered" else self.adds.accepted
        done = find(ledger_id, entry_id)
        if done is None:
            return f"nobody waits for {ledger_id}:{entry_id}"
        done("b", ledger_id, entry_id, 0)
        return f"{name} {ledger_id}:{entry_id}"

    def send_held(self, count: int) -> list[str]:
        lines: list[str] = []
        while count and (held := self.adds.next_held()) is not None:
            count -= 1
            lines.append(f"send {held.ledger_id}:{held.entry_id}{' deferred' if held.deferred else ''}")
        return lines
