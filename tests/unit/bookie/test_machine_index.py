"""RocksDB's index and its model are driven side by side, through crashes: they never differ."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from magnetar.bookie.index import LedgerRecord, Location, LocationIndex, RocksLocationIndex
from support.index_model import ModelLocationIndex, ModelStorage
from support.long_form import times

ledger_ids = st.sampled_from([0, 1, 2, 2**64 - 1])
entry_ids = st.sampled_from([0, 1, 2, 3, 7, 2**64 - 2])
places = st.builds(Location, st.integers(1, 3), st.integers(0, 5), st.integers(0, 3))
records = st.builds(
    LedgerRecord, st.booleans(), st.integers(-1, 3), st.integers(-1, 3), st.integers(-1, 3), st.integers(0, 2)
)


def copy_at_once(source: Path, target: Path) -> None:
    """As a crash leaves it: RocksDB compacts in the background, so again until no file came or went meanwhile."""
    while True:
        names = sorted(os.listdir(source))
        with contextlib.suppress(shutil.Error):  # one of them was deleted
            shutil.copytree(source, target)
            if sorted(os.listdir(source)) == names:
                return
        shutil.rmtree(target)


class IndexMachine(RuleBasedStateMachine):
    """A crash leaves a copy of the directory as it is, RocksDB's memory is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="magnetar-index-machine-"))
        self.life = 0
        self.storage = ModelStorage()
        self.changed = True
        self._open()

    def _open(self) -> None:
        self.rocks: LocationIndex = RocksLocationIndex(str(self.root / str(self.life)))
        self.model: LocationIndex = ModelLocationIndex(self.storage)

    @property
    def both(self) -> tuple[LocationIndex, LocationIndex]:
        self.changed = True
        return self.rocks, self.model

    @rule(rows=st.lists(st.tuples(ledger_ids, entry_ids, places), min_size=1, max_size=8))
    def put_locations(self, rows: list[tuple[int, int, Location]]) -> None:
        for index in self.both:
            index.put_locations(rows)

    @rule(rows=st.lists(st.tuples(ledger_ids, entry_ids, places, places), max_size=4), follow=st.booleans())
    def replace_locations(self, rows: list[tuple[int, int, Location, Location]], follow: bool) -> None:
        """A key at most once, as compaction does; `follow` takes the old place from the index."""
        once = {(ledger, entry): (old, new) for ledger, entry, old, new in rows}
        moved = [
            (*key, (self.model.get(*key) or old) if follow else old, new) for key, (old, new) in once.items()
        ]
        rocks, model = self.both
        assert rocks.replace_locations(moved) == model.replace_locations(moved)

    @rule(ledger_id=ledger_ids)
    def delete_locations(self, ledger_id: int) -> None:
        for index in self.both:
            index.delete_locations(ledger_id)

    @rule(rows=st.lists(st.tuples(ledger_ids, records), min_size=1, max_size=4))
    def put_ledgers(self, rows: list[tuple[int, LedgerRecord]]) -> None:
        for index in self.both:
            index.put_ledgers(rows)

    @rule(ledger_id=ledger_ids)
    def delete_ledger(self, ledger_id: int) -> None:
        for index in self.both:
            index.delete_ledger(ledger_id)

    @rule(locations=st.booleans(), ledgers=st.booleans())
    def flush(self, locations: bool, ledgers: bool) -> None:
        async def both() -> None:
            for index in self.both:
                if locations:
                    await index.flush_locations()
                if ledgers:
                    await index.flush_ledgers()

        asyncio.run(both())

    @rule()
    def crash(self) -> None:
        """What was flushed is there, and nothing else; the guard never cries without a reason."""
        self.life += 1
        copy_at_once(self.root / str(self.life - 1), self.root / str(self.life))
        self.rocks.close()
        shutil.rmtree(self.root / str(self.life - 1))
        self._open()
        self.changed = True

    @precondition(lambda self: self.changed)
    @invariant()
    def they_agree(self) -> None:
        self.changed = False
        rocks, model = self.rocks, self.model
        assert rocks.walk() == model.walk()
        assert rocks.walk((1, 2), 3) == model.walk((1, 2), 3)
        assert rocks.list_ledgers() == model.list_ledgers()
        for ledger_id in (0, 2, 2**64 - 1):
            assert rocks.list_locations(ledger_id, 1, 2) == model.list_locations(ledger_id, 1, 2)
            assert rocks.get_each(ledger_id, range(9)) == model.get_each(ledger_id, range(9))
            assert rocks.get(ledger_id, 7) == model.get(ledger_id, 7)
            assert rocks.get_ledger(ledger_id) == model.get_ledger(ledger_id)

    def teardown(self) -> None:
        self.rocks.close()
        shutil.rmtree(self.root)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(
    max_examples=times(20, 1000),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
