"""Settings of placement and balance: frozen data, units last."""

from __future__ import annotations

from dataclasses import dataclass, fields

from magnetar.proto.errors import InvalidSetting

_SHARES = ("shed_threshold", "overload", "report_change")
_MAY_BE_ZERO = ("move_cooldown_s", "load_settle_s", "zone_stable_s")
_LONGEST_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceSettings:
    """Frozen data; InvalidSetting names the setting that does not fit, and what would."""

    balance_interval_s: float = 30.0  # the leader looks at the cluster this often
    # A broker whose share of a core is so far above or below the mean, in so many rounds running, gives or gets bundles.
    shed_threshold: float = 0.15
    shed_rounds: int = 3
    # Requests of one round, and those of one broker among them, as source or as destination. A move stalls each of the
    # bundle's topics for one close and one load.
    max_moves_per_round: int = 100
    max_moves_per_broker: int = 10
    move_cooldown_s: float = 600.0  # a bundle that was moved rests for so long
    # So long after a bundle has changed its owner the reports of both brokers show it: an average of up to 10 s, written
    # every `report_interval_s`. Until then the leader adds what it moved to what it reads.
    load_settle_s: float = 45.0
    # A broker above this share is not chosen while others are below, and may give bundles away against their preferences.
    overload: float = 0.85
    # Bundles go back to brokers that their namespace prefers once those have been ready for so long.
    zone_stable_s: float = 120.0

    # A bundle above one of these is split, as long as its namespace has fewer bundles than `max_bundles_per_namespace`.
    split_messages_per_s: float = 30_000.0  # in and out
    split_bytes_per_s: float = 100_000_000.0  # in and out
    split_topics: int = 1_000
    max_splits_per_round: int = 10
    max_bundles_per_namespace: int = 128

    # What one broker has at most. It is chosen for nothing above, and gives away what exceeds the first two.
    max_bundles: int = 5_000
    max_topics: int = 50_000
    max_connections: int = 15_000  # fewer than a listener accepts
    # Brokers of these groups take bundles only of namespaces that are bound to the group.
    dedicated_groups: tuple[str, ...] = ()

    # What a broker reports about its bundles: at most this often, when a bundle's load changed by this share, the busiest.
    report_interval_s: float = 10.0
    report_change: float = 0.1
    max_reported_bundles: int = 2_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                continue
            least_is_zero = field.name in _MAY_BE_ZERO
            if not (value > 0 or (least_is_zero and value == 0)):
                wanted = "not be negative" if least_is_zero else "be above 0"
                raise InvalidSetting(
                    f"balance setting {field.name}={value} must {wanted}, e.g. {field.name}={field.default}"
                )
            if field.name.endswith("_s") and not field.name.endswith("_per_s") and value > _LONGEST_S:
                raise InvalidSetting(
                    f"balance setting {field.name}={value} must be at most a day ({_LONGEST_S:g}), "
                    f"e.g. {field.name}={field.default}"
                )
            if field.name in _SHARES and value >= 1:
                raise InvalidSetting(
                    f"balance setting {field.name}={value} is a share: it must be below 1, "
                    f"e.g. {field.name}={field.default}"
                )
        self._check_relations()

    def _check_relations(self) -> None:
        if self.overload <= self.shed_threshold:
            raise InvalidSetting(
                f"balance setting overload={self.overload} must be above shed_threshold={self.shed_threshold}: bundles "
                "return to a broker that they prefer below overload - shed_threshold"
            )
        if self.load_settle_s >= self.shed_rounds * self.balance_interval_s:
            raise InvalidSetting(
                f"balance setting load_settle_s={self.load_settle_s} must be below shed_rounds * balance_interval_s = "
                f"{self.shed_rounds * self.balance_interval_s:g}: a broker would be judged by what it has just received; "
                "raise shed_rounds or lower load_settle_s"
            )
        if self.max_moves_per_broker > self.max_moves_per_round:
            raise InvalidSetting(
                f"balance setting max_moves_per_broker={self.max_moves_per_broker} must not exceed "
                f"max_moves_per_round={self.max_moves_per_round}"
            )
