"""What the sizes of a ledger must satisfy: E bookies make its ensemble, an entry is on Qw of them and confirmed by Qa.

>>> quorum_problem(3, 3, 2)
''
>>> quorum_problem(2, 3, 2)
'a ledger is on ensemble_size bookies, an entry cannot be on more; lower write_quorum to 2 or raise ensemble_size'
"""

from __future__ import annotations

MAX_ENSEMBLE_SIZE = 64


def quorum_problem(ensemble_size: int, write_quorum: int, ack_quorum: int) -> str:
    """What is wrong, and the cure, unless 1 <= Qa <= Qw <= E <= 64; "" if nothing is."""
    if ack_quorum < 1:
        return "ack_quorum must be at least 1: at least one bookie must have an entry before it is confirmed"
    if ack_quorum > write_quorum:
        return (
            "an entry is written to write_quorum bookies, more cannot confirm it; lower ack_quorum to "
            f"{max(write_quorum, 1)} or raise write_quorum"
        )
    if write_quorum > ensemble_size:
        return (
            "a ledger is on ensemble_size bookies, an entry cannot be on more; lower write_quorum to "
            f"{ensemble_size} or raise ensemble_size"
        )
    if ensemble_size > MAX_ENSEMBLE_SIZE:
        return f"ensemble_size can be {MAX_ENSEMBLE_SIZE} at most"
    return ""
