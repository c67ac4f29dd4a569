"""FrameParser: any cut of the stream gives the same frames, and nothing after a bad frame."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto.errors import FrameTooLarge, MalformedFrame
from magnetar.proto.frames import FrameParser, encode_frame, encode_frames, frame_prefix

Frames = list[tuple[bytes, bytes]]
frames_strategy = st.lists(
    st.tuples(st.sampled_from([b"h", b"header", b""]), st.binary(max_size=40)), min_size=1, max_size=12
)


def flatten(parser: FrameParser, data: bytes) -> Frames:
    return [(header, payload) for header, payloads in parser.feed(data) for payload in payloads]


@given(frames_strategy, st.lists(st.integers(1, 30), min_size=1))
def test_every_cut_gives_the_same_frames(frames: Frames, cuts: list[int]) -> None:
    stream = b"".join(encode_frame(*frame) for frame in frames)
    parser = FrameParser(1000)
    found: Frames = []
    position = 0
    turn = 0
    while position < len(stream):
        step = cuts[turn % len(cuts)]
        found += flatten(parser, stream[position : position + step])
        position += step
        turn += 1
    assert found == frames
    assert parser.pending_bytes == 0
    assert parser.error is None


def test_runs_join_consecutive_equal_headers_only() -> None:
    stream = encode_frames(b"a", [b"1", b"2"]) + encode_frame(b"b", b"3") + encode_frame(b"a", b"4")
    assert FrameParser(100).feed(stream) == [(b"a", [b"1", b"2"]), (b"b", [b"3"]), (b"a", [b"4"])]


def test_prefix_and_payload_make_a_frame() -> None:
    assert frame_prefix(b"head", 3) + b"pay" == encode_frame(b"head", b"pay")


def test_frames_before_a_bad_one_are_returned_and_nothing_after_it() -> None:
    parser = FrameParser(100)
    bad = struct.pack(">IH", 101, 1) + b"x" * 99
    assert parser.feed(encode_frame(b"a", b"1") + bad) == [(b"a", [b"1"])]
    assert isinstance(parser.error, FrameTooLarge)
    assert "101" in parser.error.message
    assert "100" in parser.error.message
    assert parser.feed(encode_frame(b"a", b"2")) == []


@pytest.mark.parametrize("length", [0, 1, 2, 6])
def test_a_header_longer_than_its_frame_is_malformed(length: int) -> None:
    parser = FrameParser(100)
    assert parser.feed(struct.pack(">IH", length, length + 1) + b"y" * 20) == []
    assert isinstance(parser.error, MalformedFrame)


def test_a_length_bomb_is_refused_before_its_bytes_arrive() -> None:
    parser = FrameParser(5_000_000)
    parser.feed(b"\xff\xff\xff\xff\x00\x01")
    assert isinstance(parser.error, FrameTooLarge)
    assert parser.pending_bytes == 0
