"""`dispatch.core.delay_index` against a model that looks at every message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from magnetar.broker.cursors.core.acks import INDEX_BITS
from magnetar.broker.dispatch.core import delay_index
from magnetar.broker.dispatch.core.delay_index import WIDTHS, DelayedRun, DelayIndex, add_run

START_MS = 1_800_000_000_000
delays = st.one_of(
    st.integers(-50, 200),
    st.integers(0, 5_000),
    st.sampled_from([0, 19, 20, 999, 1_000, 1_001, 59_999, WIDTHS[0] - 1, WIDTHS[0], WIDTHS[0] + 1]),
    st.integers(0, 4 * WIDTHS[0]),
    st.integers(0, 400 * 24 * WIDTHS[0]),
)


class Model(RuleBasedStateMachine):
    """Times by message. The index is asked until it has nothing more to do at a time."""

    @initialize(ahead_ms=st.integers(0, 2 * WIDTHS[0]))
    def begin(self, ahead_ms: int) -> None:
        self.index = DelayIndex()
        self.now_ms = START_MS + ahead_ms
        self.waiting: dict[tuple[int, int, int], int] = {}
        self.entries: dict[tuple[int, int], int] = {}  # how many messages each has
        self.ledger, self.entry = 5, 0
        self.released: set[tuple[int, int, int]] = set()

    @rule(
        rows=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), delays), max_size=5),
        rest=st.integers(0, 2),
    )
    def add(self, rows: list[tuple[int, int, int]], rest: int) -> None:
        runs: list[DelayedRun] = []
        at = 0
        for gap, count, delay_ms in rows:
            at += gap
            add_run(runs, at, count, self.now_ms + delay_ms)
            at += count

        key = (self.ledger, self.entry)
        self.entry += 1
        self.entries[key] = at + rest
        if runs:
            self.index.add(key, runs, at + rest)
        for first, count, due_ms in runs:
            self.waiting.update({(*key, index): due_ms for index in range(first, first + count)})

    @rule(entries=st.integers(1, 9), delay_ms=delays)
    def add_fixed(self, entries: int, delay_ms: int) -> None:
        for _ in range(entries):
            self.add([(0, 3, delay_ms)], 0)

    @rule(more=st.integers(1, 3))
    def next_ledger(self, more: int) -> None:
        self.ledger, self.entry = self.ledger + more, 0

    @rule(ledger=st.integers(0, 12))
    def trim(self, ledger: int) -> None:
        self.index.drop_below(ledger)
        self.waiting = {place: due_ms for place, due_ms in self.waiting.items() if place[0] >= ledger}

    @rule(delay_ms=delays)
    def time_passes(self, delay_ms: int) -> None:
        self.now_ms += max(delay_ms, 0)
        self.sweep()

    @rule()
    def next_time(self) -> None:
        next_ms = self.index.next_ms
        assert (next_ms is None) == (not self.waiting)
        if next_ms is not None:
            assert next_ms <= min(self.waiting.values())
            self.now_ms = max(self.now_ms, next_ms)
            self.sweep()

    @rule(back_ms=st.integers(0, 3 * WIDTHS[0]))
    def clock_jumps_back(self, back_ms: int) -> None:
        self.now_ms -= back_ms
        self.sweep()

    @rule(after=st.integers(0, 20), order=st.randoms(), twice=st.booleans())
    def stored(self, after: int, order: Any, twice: bool) -> None:
        """Read back from pieces and changes, in another order after a damage, and some of it twice."""
        pieces = list(self.index.pieces())
        changes = list(self.index.pieces((5, after << INDEX_BITS)))
        if twice:
            pieces += changes
            order.shuffle(pieces)
        index = DelayIndex()
        for piece in pieces:
            list(index.apply(piece, self.now_ms))
            index.check()
        due = [place for place, due_ms in self.waiting.items() if due_ms <= self.now_ms]
        assert index.messages == len(self.waiting) - len(due)
        self.index = index
        for place in due:
            del self.waiting[place]

    def sweep(self) -> None:
        times: list[int] = []
        for _ in range(100_000):
            runs, more = self.index.take_due(self.now_ms)
            for ledger, first, count in runs:
                for number in range(first, first + count):
                    place = (ledger, number >> INDEX_BITS, number & ((1 << INDEX_BITS) - 1))
                    assert place not in self.released, "released twice"
                    self.released.add(place)
                    times.append(self.waiting.pop(place))
            if not more:
                break
        else:
            raise AssertionError("it never ends")
        assert all(due_ms <= self.now_ms for due_ms in times), "early"
        assert times == sorted(times)
        assert all(due_ms > self.now_ms for due_ms in self.waiting.values()), "late"

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        index = self.index
        index.check()
        assert index.messages == len(self.waiting)
        assert bool(index) == bool(self.waiting)

    @rule(data=st.data())
    def look(self, data: Any) -> None:
        if not self.entries:
            return
        key = data.draw(st.sampled_from(sorted(self.entries)))
        count = self.entries[key]
        shown = [index for index in range(count) if (*key, index) not in self.waiting]
        visible = self.index.visible(key, [(0, count - 1)]) if count else []
        assert [index for first, last in visible for index in range(first, last + 1)] == shown
        place = (*key, data.draw(st.integers(0, 3)))
        number = (key[1] << INDEX_BITS) + place[2]
        assert self.index.messages_from(key[0], number) == sum(other >= place for other in self.waiting)
        ledger, entry = key
        while count and all((ledger, entry, index) in self.waiting for index in range(count)):
            entry += 1
            count = self.entries.get((ledger, entry), 0)
        assert self.index.pass_withheld(*key) == entry


class SmallModel(Model):
    """With blocks and steps of a few rows."""

    @initialize(ahead_ms=st.integers(0, 2 * WIDTHS[0]))
    def begin(self, ahead_ms: int) -> None:
        self.before = {
            name: getattr(delay_index, name)
            for name in ("BLOCK_ROWS", "STEP", "PIECE_ROWS", "FAR_ROWS", "_SMALL_BLOCK_ROWS")
        }
        delay_index.BLOCK_ROWS, delay_index.STEP, delay_index._SMALL_BLOCK_ROWS = 4, 3, 2
        delay_index.PIECE_ROWS, delay_index.FAR_ROWS = 3, 2
        super().begin(ahead_ms)

    def teardown(self) -> None:
        for name, value in getattr(self, "before", {}).items():
            setattr(delay_index, name, value)


TestModel = Model.TestCase
TestSmallModel = SmallModel.TestCase
TestModel.settings = TestSmallModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


# --- planted defects --------------------------------------------------------------------------------------------------


def plant_bucket_lost_at_a_roll_over(patch: pytest.MonkeyPatch) -> None:
    """Only the first step of what is to be spread is spread."""
    spread = DelayIndex._spread

    def once(self: Any, level: int) -> None:
        spread(self, level)
        self._spreading.pop(level, None)

    patch.setattr(DelayIndex, "_spread", once)


def plant_early(patch: pytest.MonkeyPatch) -> None:
    """Whatever is due within the narrowest bucket comes at once."""
    take = DelayIndex._take_current
    patch.setattr(
        DelayIndex, "_take_current", lambda self, now_ms, most, found: take(self, now_ms + 19, most, found)
    )


def plant_released_twice(patch: pytest.MonkeyPatch) -> None:
    """A block whose rows were mostly released is written anew, and references to them find others."""
    patch.setattr(delay_index._Block, "at", lambda self, row: row)


def plant_what_came_since_waits(patch: pytest.MonkeyPatch) -> None:
    """What is added to the bucket that is due now waits until that is done."""
    patch.setattr(DelayIndex, "_overtaken", lambda self: False)


def plant_rows_behind_a_damage_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Rows that are read back before others take their place."""

    def new_block(self: Any, at: int, ledger: int, first: int) -> Any:
        return made(self, len(self._order), ledger, first)

    made = DelayIndex._new_block
    patch.setattr(DelayIndex, "_new_block", new_block)


def plant_far_rows_wait_for_themselves(patch: pytest.MonkeyPatch) -> None:
    """Of rows that came together references are made when the last of them is near, and not the first."""
    add_to = DelayIndex._add_to

    def late(self: Any, block: Any, numbers: Any, counts: Any, times: Any) -> None:
        before = len(self._far)
        add_to(self, block, numbers, counts, times)
        if len(self._far) > before:
            self._far = sorted(
                (max(times), *one[1:])
                if one[1:3] == (block.number, len(block.numbers) - len(numbers))
                else one
                for one in self._far
            )

    patch.setattr(DelayIndex, "_add_to", late)


PLANTS = [plant for name, plant in list(globals().items()) if name.startswith("plant_")]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_the_model_notices(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017 (whatever goes wrong)
        run_state_machine_as_test(seed(0)(SmallModel), settings=TEETH)


# It ends with the first that notices: some defects need 200.
TEETH = settings(
    max_examples=2_000,
    stateful_step_count=40,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
