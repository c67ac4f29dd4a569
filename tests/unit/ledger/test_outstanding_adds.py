"""The adds at one bookie, in any order of events: the invariants hold, and each add ends once."""

import random
from collections import Counter

import pytest

from magnetar.ledger.core.outstanding_adds import AddOutcome, OutstandingAdds, Waited

Key = tuple[int, int]


@pytest.mark.parametrize("seed", range(20))
def test_each_add_ends_once_and_every_invariant_holds(seed: int) -> None:
    rng = random.Random(seed)
    adds = OutstandingAdds(2000)
    ended: Counter[Key] = Counter()
    taken: dict[Key, bool] = {}  # of those that have not ended: whether the bookie has them
    next_entry = Counter[int]()

    def done(bookie: str, ledger_id: int, entry_id: int, code: int) -> None:
        raise AssertionError("the core gives callbacks back, and calls none")

    def end(key: Key) -> None:
        del taken[key]
        ended[key] += 1

    for _ in range(500):
        ledger_id = rng.randrange(3)
        event = rng.choice(
            ("add", "add", "add", "release", "answer", "answer", "accept", "force", "tick", "heard")
        )
        if event == "add":
            entry_id = next_entry[ledger_id]
            next_entry[ledger_id] += 1
            outcome = adds.add(
                ledger_id, entry_id, bytes(100), done, deferred=rng.random() < 0.5, ready=rng.random() < 0.8
            )
            if outcome is not AddOutcome.REFUSED:
                taken[ledger_id, entry_id] = outcome is AddOutcome.SEND
        elif event == "release":
            while (held := adds.next_held()) is not None:
                taken[held.ledger_id, held.entry_id] = True
        elif event in ("answer", "accept"):
            sent = [key for key, is_sent in taken.items() if is_sent]
            if sent:
                key = rng.choice(sent)
                if event == "accept":
                    adds.accepted(*key)
                elif adds.answered(*key) is not None:
                    end(key)
        elif event == "force":
            adds.force(ledger_id)
        elif event == "heard":
            adds.heard()
        elif adds.tick() in (Waited.SILENT, Waited.TOO_SLOW) or rng.random() < 0.01:
            for failed_ledger, failed_entry, _ in adds.fail():
                end((failed_ledger, failed_entry))
            assert not taken, "all of them fail together"
        adds.check()
    for failed_ledger, failed_entry, _ in adds.fail():
        end((failed_ledger, failed_entry))
    assert not taken
    assert set(ended.values()) == {1}
