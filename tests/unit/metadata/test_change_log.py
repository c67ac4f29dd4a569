"""The log of the embedded store: power lost at every call, every bit flipped, and what is torn told from what is damaged."""

import random

import pytest
import xxhash

from magnetar.metadata import change_log
from magnetar.metadata.change_log import ChangeLog
from magnetar.proto.errors import DataDirectoryError, DiskFull
from support.sim import SimDisk
from support.sim.files import SimFiles

CHANGES = [b"%d" % number * (1 + number * 37 % 200) for number in range(40)]
TURN_BYTES = 8192  # a turn has some records only


class PowerLost(Exception):
    pass


class Database:
    """What the store's database has flushed: all changes before a turn. A turn is flushed when the next but one is due."""

    def __init__(self) -> None:
        self.turn = 0
        self.changes: list[bytes] = []

    def opened(self, files: SimFiles) -> tuple[ChangeLog, list[bytes]]:
        log = ChangeLog(files, "/m", turn_bytes=TURN_BYTES)
        log.open()
        return log, [*self.changes, *log.replay(self.turn)]

    def append(self, log: ChangeLog, known: list[bytes], change: bytes) -> None:
        log.append(change)
        known.append(change)
        if log.full:
            log.begin_turn()
            self.turn, self.changes = log.turn, list(known)


def fresh(seed: int = 1) -> SimDisk:
    disk = SimDisk(random.Random(seed))
    disk.early_writeback = 0.3
    disk.mount().make_directory("/m")
    ChangeLog(disk.mount(), "/m", turn_bytes=TURN_BYTES).create()
    return disk


def write_all(disk: SimDisk, changes: list[bytes]) -> tuple[Database, list[bytes]]:
    database = Database()
    log, known = database.opened(disk.mount())
    for change in changes:
        database.append(log, known, change)
    log.close()
    return database, known


def test_all_changes_come_back_over_many_turns() -> None:
    disk = fresh()
    database, known = write_all(disk, CHANGES * 5)
    log, found = database.opened(disk.mount())
    assert found == known == CHANGES * 5
    assert log.turn > 5
    database.append(log, found, b"one more")
    log.close()
    assert database.opened(disk.mount())[1][-1] == b"one more"


def test_a_turn_that_the_database_has_not_flushed_is_replayed_with_the_next() -> None:
    disk = fresh()
    log = ChangeLog(disk.mount(), "/m", turn_bytes=TURN_BYTES)
    log.open()
    assert not list(log.replay(0))
    log.append(b"first")
    log.begin_turn()
    log.append(b"second")
    log.close()
    for first_turn, wanted in ((0, [b"first", b"second"]), (1, [b"second"])):
        log = ChangeLog(disk.mount(), "/m")
        log.open()
        assert list(log.replay(first_turn)) == wanted
        log.close()
    log = ChangeLog(disk.mount(), "/m")
    log.open()
    with pytest.raises(DataDirectoryError, match="needs turn 2"):
        list(log.replay(2))


@pytest.mark.parametrize("seed", range(3))
def test_rule_5_power_lost_at_every_call_loses_nothing_that_was_acknowledged(seed: int) -> None:
    def stop() -> None:
        raise PowerLost

    total = fresh(seed)
    write_all(total, CHANGES)
    for point in range(fresh(seed).calls, total.calls):
        disk = fresh(seed * 1000 + point)
        disk.at_call(point, stop)
        database = Database()
        log, known = database.opened(disk.mount())
        written: list[bytes] = []
        try:
            for change in CHANGES:
                written.append(change)
                database.append(log, known, change)
        except PowerLost:
            pass
        disk.lose_power()
        log, found = database.opened(disk.mount())
        assert found in (known, written), point
        database.append(log, found, b"after")  # over what is torn
        log.close()
        assert database.opened(disk.mount())[1] == found, point


def flip_each_bit(
    disk: SimDisk, path: str, begin: int, end: int, database: Database, known: list[bytes]
) -> dict[str, int]:
    """What opening makes of each flipped bit."""
    outcomes = {"refused": 0, "same": 0, "lost": 0}
    file = disk.mount().open(path)
    for offset in range(begin, end):
        for bit in (0, 3, 7):
            good = file.read_at(offset, 1)
            file.write_at(offset, [bytes([good[0] ^ 1 << bit])])
            try:
                _, found = database.opened(disk.mount())
                outcomes["same" if found == known else "lost"] += 1
            except DataDirectoryError:
                outcomes["refused"] += 1
            file.write_at(offset, [good])
    return outcomes


def test_rule_5_no_flipped_bit_is_taken_for_a_torn_write() -> None:
    """Also none in the last record, once the log had a pause; RocksDB's log forgot what followed a bad length."""
    disk = fresh()
    database, known = write_all(disk, CHANGES[:7])
    log, _ = database.opened(disk.mount())
    log.note_synced()
    end = log.position
    outcomes = flip_each_bit(disk, f"/m/changes-{log.turn % 2}", 4096, end, database, known)
    assert outcomes["lost"] == 0
    assert outcomes["refused"] > 1000


def test_teeth_without_the_note_the_last_record_may_be_lost() -> None:
    disk = fresh()
    database, known = write_all(disk, CHANGES[:2])
    log, _ = database.opened(disk.mount())
    assert flip_each_bit(
        disk, f"/m/changes-{log.turn % 2}", log.position - 16, log.position, database, known
    )["lost"]


def test_a_flipped_bit_of_a_header_is_refused_or_harmless() -> None:
    disk = fresh()
    database, known = write_all(disk, CHANGES)
    database.turn, database.changes = database.turn - 1, []  # both files are needed
    log = ChangeLog(disk.mount(), "/m")
    log.open()
    known = list(log.replay(database.turn))
    log.append(b"last")
    known.append(b"last")
    for number in range(2):
        outcomes = flip_each_bit(disk, f"/m/changes-{number}", 0, 40, database, known)
        assert outcomes["lost"] == 0
        assert outcomes["refused"]


def test_a_missing_file_and_one_that_was_put_in_place_of_the_other_are_refused() -> None:
    disk = fresh()
    database, _ = write_all(disk, CHANGES)
    files = disk.mount()
    data = [files.read(f"/m/changes-{number}") for number in range(2)]
    files.write_atomically("/m/changes-0", data[1])
    with pytest.raises(DataDirectoryError, match="the other file"):
        database.opened(disk.mount())
    files.delete("/m/changes-0")
    with pytest.raises(DataDirectoryError, match="missing"):
        database.opened(disk.mount())


def test_an_older_version_is_named() -> None:
    disk = fresh()
    header = change_log._HEADER.pack(b"MAGMDLOG", 9, 0, 4096)
    disk.mount().open("/m/changes-0").write_at(0, [header, xxhash.xxh3_64_digest(header)])
    with pytest.raises(DataDirectoryError, match="format version 9"):
        Database().opened(disk.mount())


def test_rule_39_a_full_disk_takes_changes_until_the_turn_is_full_and_loses_none() -> None:
    disk = fresh()
    log = ChangeLog(disk.mount(), "/m", turn_bytes=TURN_BYTES)
    log.open()
    assert not list(log.replay(0))
    disk.capacity_bytes = disk.used_bytes()
    appended: list[bytes] = []

    def fill() -> None:
        for change in CHANGES * 5:
            log.append(change)
            appended.append(change)

    with pytest.raises(DiskFull):
        fill()
    assert len(appended) > 10
    disk.capacity_bytes = 1 << 30
    log.append(b"room again")
    log.close()
    log = ChangeLog(disk.mount(), "/m", turn_bytes=TURN_BYTES)
    log.open()
    assert list(log.replay(0)) == [*appended, b"room again"]
