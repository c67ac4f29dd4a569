"""Cookie, mark, lock and golden formats: whose directory this is, and one clear error for everything that it is not."""

import shutil
from pathlib import Path

import pytest

from magnetar.bookie.cookie import Cookie, CookieDirectory, decode_cookie, encode_cookie
from magnetar.bookie.entry_log.records import (
    decode_footer,
    encode_footer,
    encode_log_header,
    encode_record_header,
)
from magnetar.bookie.index import LedgerRecord, decode_ledger_record, encode_ledger_record
from magnetar.bookie.mark import JournalPosition, decode_mark, encode_mark, mark_moves_forward
from magnetar.bookie.sealed_file import seal
from magnetar.proto.errors import DataDirectoryError, StorageFailed
from support.bookie_kit import add, crash, entry, open_inline, open_real
from support.index_model import ModelStorage

COOKIE = Cookie(
    0x0123456789ABCDEF,
    "bookie-1",
    cluster=7,
    journal_directories=("journal", "/mnt/j"),
    ledger_directories=(CookieDirectory("ledgers"), CookieDirectory("/mnt/l", lost=True)),
)
MARK = {"journal": JournalPosition(3, 5000, 4000), "/mnt/j": JournalPosition(4, 1, 0)}


def test_golden_cookie_and_mark() -> None:
    assert encode_cookie(COOKIE).hex() == GOLDEN_COOKIE
    assert decode_cookie(encode_cookie(COOKIE), "c") == COOKIE
    assert encode_mark(MARK).hex() == GOLDEN_MARK
    assert decode_mark(encode_mark(MARK), "m") == MARK
    assert decode_mark(encode_mark({}), "m") == {}


def test_golden_entry_log() -> None:
    assert encode_log_header(5).hex() == "4d4147454c4f470a" + "00000001" + "00000005" + "00" * 48
    assert encode_record_header(5, 1, 2, b"entry").hex() == GOLDEN_RECORD
    footer = encode_footer(5, {9: 100, 1: 50}, 214)
    assert footer.hex() == GOLDEN_FOOTER
    size = 214 + len(footer)
    assert decode_footer(b"whatever" + footer, 5, size) == ({1: 50, 9: 100}, 214)
    assert decode_footer(b"whatever" + footer, 6, size) is None
    assert decode_footer(b"whatever" + footer, 5, size + 1) is None
    assert decode_footer(footer[:-1], 5, size) is None


def test_golden_ledger_record() -> None:
    record = LedgerRecord(True, 7, 9, 8)
    assert encode_ledger_record(record).hex() == "01" + "%016x" * 4 % (7, 9, 8, 0)
    assert decode_ledger_record(encode_ledger_record(record)) == record
    for damaged in (encode_ledger_record(record)[:-1], encode_ledger_record(record) + b"0", b""):
        with pytest.raises(StorageFailed, match="wrong length"):
            decode_ledger_record(damaged)


@pytest.mark.parametrize("position", range(0, len(encode_cookie(COOKIE)), 7))
def test_a_damaged_cookie_is_named(position: int) -> None:
    data = bytearray(encode_cookie(COOKIE))
    data[position] ^= 1
    with pytest.raises(DataDirectoryError, match="cookie"):
        decode_cookie(bytes(data), "/data/cookie")


def test_another_format_version_is_named() -> None:
    for decode, magic in ((decode_cookie, b"MAGNETAR-BOOKIE\n"), (decode_mark, b"MAGMARK\n")):
        with pytest.raises(
            DataDirectoryError, match="format version 9, this program reads 1; run the version"
        ):
            decode(seal(magic, 9, {}), "/data/x")
        with pytest.raises(DataDirectoryError, match="/data/x is damaged"):
            decode(seal(magic, 1, {"journal": 7}), "/data/x")


def test_rule_03_a_vector_moves_forward_only_as_a_whole() -> None:
    a, b = JournalPosition(3, 5000, 4000), JournalPosition(3, 5001, 4000)
    assert mark_moves_forward({"x": a, "y": a}, {"x": a, "y": b})
    assert not mark_moves_forward({"x": a, "y": b}, {"x": b, "y": a})
    assert not mark_moves_forward({"x": a}, {"x": b, "y": a})
    assert mark_moves_forward({"x": a}, {"x": b, "y": a}, directories_change=True)
    assert not mark_moves_forward({"x": b}, {"x": a, "y": a}, directories_change=True)


async def test_rule_09_data_without_a_cookie_is_not_overwritten(tmp_path: Path) -> None:
    storage = ModelStorage()
    bookie = await open_inline(str(tmp_path), storage)
    await add(bookie, entry(1, 0))
    await bookie.close()
    cookie = (tmp_path / "cookie").read_bytes()
    (tmp_path / "cookie").unlink()
    with pytest.raises(DataDirectoryError, match="no cookie"):
        await open_inline(str(tmp_path), storage)
    (tmp_path / "cookie").write_bytes(cookie)
    bookie = await open_inline(str(tmp_path), storage)
    assert (await bookie.read(1, 0, 0))[0] == [entry(1, 0)]
    await bookie.close()


@pytest.mark.parametrize("name", ["journal", "ledgers"])
async def test_rule_09_a_known_cookie_with_a_missing_disk_refuses_to_start(tmp_path: Path, name: str) -> None:
    storage = ModelStorage()
    await (await open_inline(str(tmp_path), storage)).close()
    (tmp_path / name).rename(tmp_path / "elsewhere")
    with pytest.raises(DataDirectoryError, match="missing"):
        await open_inline(str(tmp_path), storage)


@pytest.mark.real
async def test_rule_08_a_lost_index_refuses_to_start_instead_of_denying_everything(tmp_path: Path) -> None:
    bookie = await open_real(str(tmp_path))
    assert await add(bookie, entry(1, 0)) == 0
    await bookie.close()
    (tmp_path / "index").rename(tmp_path / "aside")
    for _ in range(2):
        with pytest.raises(DataDirectoryError, match=r"index .* is missing"):
            await open_real(str(tmp_path))
    shutil.rmtree(tmp_path / "index", ignore_errors=True)
    (tmp_path / "aside").rename(tmp_path / "index")
    bookie = await open_real(str(tmp_path))
    assert (await bookie.read(1, 0, 0))[0] == [entry(1, 0)]
    await bookie.close()


async def test_an_index_of_another_bookie_is_refused(tmp_path: Path) -> None:
    storage = ModelStorage()
    await (await open_inline(str(tmp_path), storage)).close()
    assert storage.instance is not None
    storage.instance += 1
    with pytest.raises(DataDirectoryError, match="another bookie"):
        await open_inline(str(tmp_path), storage)


async def test_a_missing_or_damaged_mark_refuses_to_start(tmp_path: Path) -> None:
    storage = ModelStorage()
    bookie = await open_inline(str(tmp_path), storage)
    await add(bookie, entry(1, 0))
    crash(bookie)
    mark = (tmp_path / "mark").read_bytes()
    (tmp_path / "mark").write_bytes(mark[:-1] + b"?")
    with pytest.raises(DataDirectoryError, match="damaged"):
        await open_inline(str(tmp_path), storage)
    (tmp_path / "mark").unlink()
    with pytest.raises(DataDirectoryError, match=r"mark .* is missing"):
        await open_inline(str(tmp_path), storage)


async def test_another_bookies_directory(tmp_path: Path) -> None:
    await (await open_inline(str(tmp_path), ModelStorage(), bookie_id="a")).close()
    with pytest.raises(DataDirectoryError, match="belongs to bookie 'a'"):
        await open_inline(str(tmp_path), ModelStorage(), bookie_id="b")


async def test_rule_12b_a_second_bookie_on_the_directory_is_refused_after_a_bounded_wait(
    tmp_path: Path,
) -> None:
    bookie = await open_inline(str(tmp_path), ModelStorage())
    with pytest.raises(DataDirectoryError, match="in use"):
        await open_inline(str(tmp_path), ModelStorage(), lock_timeout_s=0.05)
    assert await add(bookie, entry(1, 0)) == 0
    await bookie.close()


async def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirectoryError):
        await open_inline(str(tmp_path / "file"), ModelStorage())


GOLDEN_COOKIE = (
    "4d41474e455441522d424f4f4b49450a000000018ca8696e7374616e6365cf0123456789abcdefa9626f6f6b69655f69"
    "64a8626f6f6b69652d31a7636c757374657207a4726f6c65a464617461a96469726563746f7279a0b36a6f75726e616c"
    "5f6469726563746f7269657392a76a6f75726e616ca62f6d6e742f6ab26c65646765725f6469726563746f7269657392"
    "92a76c656467657273c292a62f6d6e742f6cc3a9726570616972696e67c2a673746172747300ac696e6361726e617469"
    "6f6e7390ae6e6578745f6c65646765725f696400a96c6f73745f6c6f6773c2079ee04038eee81c"
)
GOLDEN_MARK = (
    "4d41474d41524b0a0000000182a62f6d6e742f6a93040100a76a6f75726e616c9303cd1388cd0fa0b029ed8396c242ad"
)
GOLDEN_RECORD = "9e600aa0bc646937000000000000000100000000000000020000000500000000"
GOLDEN_FOOTER = (
    "00000000000000010000000000000032000000000000000900000000000000645926496a28376b730000000200000001"
    "00000000000000d64d4147454c465452"
)
