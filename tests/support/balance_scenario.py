"""Runs the text scenarios of the balancer (tests/scenarios/balance_*.txt): a command, `----`, and what the core decides.

    settings NAME=VALUE...            of BalanceSettings; a new core
    broker NAME [zone=] [group=] [state=] [idle=SHARE]     comes or changes; `idle`: of other programs
    gone NAME...                      it died: its bundles are owned by nobody
    bundle NS.NAME [owner=] [share=] [topics=]             comes or changes; `share` of a core
    bind NS [zone=] [group=] [strict]
    request NS.NAME                   somebody has requested something about it
    round [N] [stale] [stale=NAME]    N rounds, 30 s each; stale: the brokers' reports, or one's, stay as they were
    carry                             owners do what was requested; a bundle that is split has parts NAME-0 and NAME-1
    wait S                            so many seconds pass

A broker's load is that of its bundles. `check()` runs after every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magnetar.broker.ownership.balance.core.balancer import BalancerCore
from magnetar.broker.ownership.balance.core.facts import (
    BrokerFacts,
    BundleLoad,
    BundleOwner,
    ClusterSnapshot,
    Decision,
    Move,
    NamespaceBinding,
    Split,
    bundle_range,
    namespace_of,
)
from magnetar.broker.ownership.balance.settings import BalanceSettings
from support.text_scenarios import play

# Messages a second, in and out together, that take a whole core.
WHOLE_CORE = 100_000.0
_RANGE = 1 << 20


def run_scenario(text: str) -> str:
    """The text with what the core decides."""
    return play(text, _Scenario().run)


@dataclass
class _Bundle:
    name: str
    owner: str = ""
    share: float = 0.0
    topics: int = 10


def row_of(name: str, share: float, topics: int = 10) -> BundleLoad:
    """What a bundle reports that takes such a share of a core."""
    return BundleLoad(name, topics, share * WHOLE_CORE / 2, 0.0, share * WHOLE_CORE / 2, 0.0)


class _Scenario:
    def __init__(self) -> None:
        self.now = 0.0
        self.settings = BalanceSettings(split_messages_per_s=WHOLE_CORE / 2)
        self.core = BalancerCore(self.settings)
        self.brokers: dict[str, BrokerFacts] = {}
        self.idle: dict[str, float] = {}
        self.bundles: dict[str, _Bundle] = {}  # by their short name
        self.bindings: dict[str, NamespaceBinding] = {}
        self.requested: dict[str, Decision | None] = {}  # by short name
        self.reports: dict[str, tuple[BrokerFacts, list[BundleLoad]]] = {}

    def run(self, line: str) -> list[str]:
        name, *rest = line.split()
        options = dict(word.split("=", 1) for word in rest if "=" in word)
        words = [word for word in rest if "=" not in word]
        answer: list[str] | None = getattr(self, f"do_{name}")(words, options)
        return answer or []

    def do_settings(self, words: list[str], options: dict[str, str]) -> None:
        values: dict[str, Any] = {"split_messages_per_s": WHOLE_CORE / 2}
        for name, text in options.items():
            default = getattr(self.settings, name)
            values[name] = tuple(text.split(",")) if isinstance(default, tuple) else type(default)(text)
        self.settings = BalanceSettings(**values)
        self.core = BalancerCore(self.settings)

    def do_broker(self, words: list[str], options: dict[str, str]) -> None:
        known = self.brokers.get(words[0], BrokerFacts(words[0]))
        self.idle[words[0]] = float(options.pop("idle", self.idle.get(words[0], 0.0)))
        if "connections" in options:
            known = known._replace(connections=int(options.pop("connections")))
        changes: dict[str, Any] = dict(options)
        self.brokers[words[0]] = known._replace(**changes)

    def do_gone(self, words: list[str], options: dict[str, str]) -> None:
        for name in words:
            del self.brokers[name]

    def do_bundle(self, words: list[str], options: dict[str, str]) -> None:
        short = words[0]
        if short not in self.bundles:
            first = len(self.bundles) * _RANGE
            self.bundles[short] = _Bundle(f"t/{short.split('.')[0]}/0x{first:08x}_0x{first + _RANGE - 1:08x}")
        bundle = self.bundles[short]
        bundle.owner = options.get("owner", bundle.owner)
        bundle.share = float(options.get("share", bundle.share))
        bundle.topics = int(options.get("topics", bundle.topics))

    def do_bind(self, words: list[str], options: dict[str, str]) -> None:
        self.bindings[f"t/{words[0]}"] = NamespaceBinding(**options, strict="strict" in words)

    def do_request(self, words: list[str], options: dict[str, str]) -> None:
        self.requested[words[0]] = None

    def do_wait(self, words: list[str], options: dict[str, str]) -> None:
        self.now += float(words[0])

    def do_carry(self, words: list[str], options: dict[str, str]) -> None:
        for short, decision in self.requested.items():
            if isinstance(decision, Move):
                self.bundles[short].owner = decision.to
            elif isinstance(decision, Split):
                whole = self.bundles.pop(short)
                first, last = bundle_range(whole.name)
                middle = (first + last) // 2
                for number, (begin, end) in enumerate(((first, middle), (middle + 1, last))):
                    name = f"{namespace_of(whole.name)}/0x{begin:08x}_0x{end:08x}"
                    self.bundles[f"{short}-{number}"] = _Bundle(
                        name, whole.owner, whole.share / 2, (whole.topics + 1 - number) // 2
                    )
        self.requested.clear()

    def do_round(self, words: list[str], options: dict[str, str]) -> list[str]:
        lines: list[str] = []
        rounds = next((int(word) for word in words if word.isdigit()), 1)
        for _ in range(rounds):
            self.now += 30
            if "stale" not in words:
                self.report(options.get("stale", ""))
            for decision in self.core.round(self.snapshot(), self.now):
                if decision is not None:
                    lines.append(f"at {self.now:g}: {self.describe(decision)}")
            self.core.check()
        return lines or ["nothing"]

    def report(self, silent: str) -> None:
        reports = {}
        for name, broker in self.brokers.items():
            if name == silent:
                reports[name] = self.reports[name]
                continue
            owned = [one for one in self.bundles.values() if one.owner == name]
            cpu = round(self.idle[name] + sum(one.share for one in owned), 2)
            topics = sum(one.topics for one in owned)
            rows = [row_of(one.name, one.share, one.topics) for one in owned]
            reports[name] = (
                broker._replace(cpu=cpu, bundles=len(owned), topics=topics),
                rows,
            )
        self.reports = reports

    def snapshot(self) -> ClusterSnapshot:
        brokers = [broker for broker, _ in self.reports.values()]
        reports = {name: rows for name, (_, rows) in self.reports.items()}
        owners = [BundleOwner(one.name, one.owner) for one in self.bundles.values() if one.owner]
        requested = [self.bundles[short].name for short in self.requested]
        return ClusterSnapshot(brokers, owners, reports, requested, self.bindings)

    def describe(self, decision: Decision) -> str:
        short = next(name for name, one in self.bundles.items() if one.name == decision.bundle)
        self.requested[short] = decision
        if isinstance(decision, Move):
            return f"move {short} ({decision.share:.2f}) from {decision.source} to {decision.to}: {decision.reason}"
        return f"split {short} of {decision.broker}: {decision.reason}"
