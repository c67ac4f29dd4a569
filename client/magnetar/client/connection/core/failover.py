"""Failover: which of several clusters a client should use, by what probes of them found.

    in use         what the probes say                                         then
    any            it answers                                                  stay; its time of failing starts anew
    any            it has not answered for failover_delay, another one does    go to the first one that answers
    any            the same, and no other answers                              stay
    a secondary    the primary answered all the time for switch_back_delay     go back to the primary

Clusters are numbers, 0 is the primary; times are of one clock, in seconds.

>>> failover = Failover(2, failover_delay_s=10, switch_back_delay_s=20)
>>> [failover.probed(now, {0: False, 1: True}) for now in (0, 5, 10)], failover.in_use
([False, False, True], 1)
>>> [failover.probed(now, {0: True, 1: True}) for now in (15, 30, 35)], failover.in_use
([False, False, True], 0)
"""

from __future__ import annotations

from collections.abc import Mapping


class Failover:
    """The decisions of one client. in_use: the cluster that it should use."""

    def __init__(self, clusters: int, *, failover_delay_s: float, switch_back_delay_s: float) -> None:
        self.in_use = 0
        self._clusters = clusters
        self._failover_delay_s = failover_delay_s
        self._switch_back_delay_s = switch_back_delay_s
        self._down_since: float | None = None  # of the cluster in use: since when no probe was answered
        self._primary_up_since: float | None = None  # while it is not in use

    def to_probe(self) -> list[int]:
        """Which ones the next decision needs: the one in use, the primary, and the others while the first is down."""
        if self._down_since is not None:
            return list(range(self._clusters))
        return [self.in_use] if self.in_use == 0 else [0, self.in_use]

    def use(self, cluster: int) -> None:
        """The client has connected to this one."""
        self.in_use = cluster
        self._down_since = self._primary_up_since = None

    def probed(self, now: float, answers: Mapping[int, bool]) -> bool:
        """Whether each of those that were probed answered; True if `in_use` has changed."""
        if answers[self.in_use]:
            self._down_since = None
        elif self._down_since is None:
            self._down_since = now
        if not answers.get(0, False):
            self._primary_up_since = None
        elif self.in_use != 0 and self._primary_up_since is None:
            self._primary_up_since = now
        if self._down_since is not None and now - self._down_since >= self._failover_delay_s:
            for cluster in range(self._clusters):
                if cluster != self.in_use and answers.get(cluster, False):
                    self.use(cluster)
                    return True
        if self._primary_up_since is not None and now - self._primary_up_since >= self._switch_back_delay_s:
            self.use(0)
            return True
        return False
