"""The slowest of many readers, and who is notified."""

from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.cursors.core.acks import EntryKey
from magnetar.broker.dispatch.readers import Readers


class Reader:
    """Counts its runs, and may register again."""

    def __init__(self, readers: Readers) -> None:
        self.readers = readers
        self.runs = 0

    def run(self) -> None:
        """See `readers.Reader`."""
        self.runs += 1
        if self.runs % 2:
            self.readers.wait(self)


@given(
    st.lists(
        st.tuples(st.sampled_from(["move", "move", "move", "leave"]), st.integers(0, 3), st.integers(0, 5))
    )
)
def test_the_slowest_is_the_lowest_position_of_all(steps: list[tuple[str, int, int]]) -> None:
    told: list[EntryKey | None] = []
    readers = Readers(told.append)
    all_of = [Reader(readers) for _ in range(4)]
    model: dict[int, EntryKey] = {}
    for what, number, entry in steps:
        before = min(model.values(), default=None)
        told.clear()
        if what == "move":
            readers.moved(all_of[number], (1, entry))
            model[number] = (1, entry)
        else:
            readers.left(all_of[number])
            model.pop(number, None)
        readers.check()
        assert len(readers) == len(model)
        slowest = min(model.values(), default=None)
        assert set(told) <= {slowest}
        if before is not None and (slowest is None or slowest > before):
            assert told, "the cache keeps what everybody has passed"


def test_only_who_waits_is_run_and_only_once() -> None:
    readers = Readers(lambda key: None)
    one, other = Reader(readers), Reader(readers)
    readers.wait(one)
    readers.wait(one)
    readers.notify()
    assert (one.runs, other.runs) == (1, 0)
    readers.notify()  # it had registered again
    readers.notify()
    assert one.runs == 2
    readers.wait(other)
    readers.left(other)
    readers.notify()
    assert other.runs == 0
