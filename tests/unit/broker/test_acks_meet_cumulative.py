"""Found by the simulation (broker, seed 17): a cumulative acknowledgement that meets individual ones behind it."""

from magnetar.broker.cursors.core.acks import AckState, Position


class OneLedger:
    """A topic of one open ledger."""

    def normalise(self, position: Position) -> Position:
        return position


def test_cumulative_ack_that_completes_an_entry_moves_the_mark_to_the_next_entry() -> None:
    state = AckState(OneLedger(), (146, 26, 0))
    state.ack(146, 26, 2, 4, 5)
    assert state.ack_through(146, 26, 1, 5)
    state.check()
    assert state.mark_delete == (146, 27, 0)
    state.ack(146, 27, 0, 0, 1)
    assert state.mark_delete == (146, 28, 0)
    assert state.range_count == 0


def test_cumulative_ack_that_leaves_a_gap_stops_at_it() -> None:
    state = AckState(OneLedger(), (146, 26, 0))
    state.ack(146, 26, 3, 4, 5)
    assert state.ack_through(146, 26, 1, 5)
    state.check()
    assert state.mark_delete == (146, 26, 2)
    state.ack(146, 26, 2, 2, 5)
    assert state.mark_delete == (146, 27, 0)
