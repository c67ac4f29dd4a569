"""Messages in chunks, put together again (sans I/O): chunks in, whole messages out. For the client and for Spark.

A message that is larger than a batch may be is sent as several batches of one message each, its *chunks*, which have the
sequence id of the message, a random id of their own, and a number: 0, 1, 2 ... and the last one is marked. A topic has them
in order, with other messages between them.

    nothing     --chunk 0-->                                   unfinished
    nothing     --another chunk-->                             an orphan: reading began behind chunk 0, or that was let go
    unfinished  --the next chunk-->                            unfinished, or with the last one finished
    unfinished  --a chunk that it has, stored again-->         unfinished
    unfinished  --a chunk behind the next one-->               let go
    unfinished  --chunk 0 of one message too many-->           let go: the one that has waited longest for a chunk
    unfinished  --nothing more within `expire_s`-->            silent: who knows whether more can come is to be asked

What is let go is *given back*, to be delivered again, unless nobody can ever finish it: then it is *dropped*, which is to
acknowledge it. The assembler cannot know which: who has the rest, or a broker that cannot read it, may only be slow. What is
let go for want of room can be finished, and waits for room when it comes again: it does not take the place of another one.

>>> chunks = Assembler[int](max_messages=10, max_bytes=100, expire_s=60.0)
>>> chunks.add("p", Chunk(b"8 bytes.", 0, False), place=5, piece=b"ab", now=0.0).message.finished
False
>>> added = chunks.add("p", Chunk(b"8 bytes.", 1, True), place=7, piece=b"c", now=1.0)
>>> added.message.finished, added.message.places, b"".join(added.message.pieces)
(True, [5, 7], b'abc')
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from .batch_extensions import Chunk

P = TypeVar("P")  # where a chunk is stored
Key = tuple[str, bytes]  # producer, chunk id: two producers may have drawn the same one

MAX_GIVEN_BACK = 1_000  # messages that were given back and are remembered


class Unfinished(Generic[P]):
    """A message of which chunks are missing, or (`finished`) none any more.

    places: of all its chunks, those that were stored twice included. pieces: the value so far, unless it is `too_large`.
    size: bytes of the value so far. sink: whatever the caller attaches; end, asked: the same, until another chunk comes.
    """

    __slots__ = (
        "asked",
        "end",
        "finished",
        "heard",
        "key",
        "next_index",
        "pieces",
        "places",
        "sink",
        "size",
        "too_large",
    )

    def __init__(self, key: Key) -> None:
        self.key = key
        self.places: list[P] = []
        self.pieces: list[bytes] = []
        self.size = 0
        self.next_index = 0
        self.heard = 0.0  # when its last chunk came
        self.finished = False
        self.too_large = False
        self.sink: Any = None
        self.end: Any = None
        self.asked = False


class LetGo(NamedTuple, Generic[P]):
    """What cannot be finished now. `orphan`: a chunk without those before it, which perhaps nobody has."""

    why: str
    key: Key
    places: list[P]
    message: Unfinished[P] | None = None
    orphan: bool = False


class Added(NamedTuple, Generic[P]):
    """What a chunk did: it belongs to `message` (None: to none that is known), and `let_go` is to be let go."""

    message: Unfinished[P] | None
    let_go: list[LetGo[P]]
    repeated: bool = False  # the message had it already


class Assembler(Generic[P]):
    """See the module docstring. `now`: seconds of any clock that never runs back."""

    def __init__(self, max_messages: int, max_bytes: int, expire_s: float, *, holds: bool = True) -> None:
        """max_messages: unfinished ones. max_bytes: of a message; of a larger one, and without `holds`, none is held."""
        self._holds = holds
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._expire_s = expire_s
        self._unfinished: dict[Key, Unfinished[P]] = {}  # the one that has waited longest for a chunk first
        self._given_back: dict[
            Key, None
        ] = {}  # for want of room; the one that was given back last is the last

    @property
    def unfinished(self) -> list[Unfinished[P]]:
        """The messages of which chunks are missing."""
        return list(self._unfinished.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of the pieces that are held here."""
        return sum(sum(map(len, one.pieces)) for one in self._unfinished.values())

    @property
    def next_due(self) -> float | None:
        """When a message is silent, unless another chunk comes before."""
        first = next(iter(self._unfinished.values()), None)
        return None if first is None else first.heard + self._expire_s

    def add(self, producer: str, chunk: Chunk, place: P, piece: bytes, now: float) -> Added[P]:
        """A chunk was read."""
        key = (producer, chunk.chunk_id)
        message = self._unfinished.pop(key, None)
        let_go = list[LetGo[P]]()
        if message is not None and chunk.index > message.next_index:
            why = f"chunk {message.next_index} of it is missing"
            let_go.append(LetGo(why, key, message.places, message))
            message = None
        if message is None:
            if chunk.index:
                why = f"chunk {chunk.index} came without those before it"
                return Added(None, [*let_go, LetGo(why, key, [place], orphan=True)])
            if len(self._unfinished) >= self._max_messages:
                if key in self._given_back:  # else those that nobody finishes would take turns for ever
                    return Added(None, [*let_go, self._no_room(key, [place])])
                oldest = self._unfinished.pop(next(iter(self._unfinished)))
                let_go.append(self._no_room(oldest.key, oldest.places, oldest))
            message = Unfinished(key)
        repeated = chunk.index < message.next_index
        if not repeated or place not in message.places:
            message.places.append(place)
        if not repeated:
            message.next_index += 1
            message.finished = chunk.last
            message.size += len(piece)
            if self._holds and not message.too_large:
                message.pieces.append(piece)
            if self._holds and message.size > self._max_bytes:
                message.too_large = True
                message.pieces.clear()
        message.heard, message.end, message.asked = now, None, False
        if message.finished:
            self._given_back.pop(key, None)
        else:
            self._unfinished[key] = message
        return Added(message, let_go, repeated)

    def silent(self, now: float) -> list[Unfinished[P]]:
        """The messages that got no chunk for `expire_s`: to be touched, or removed."""
        return [one for one in self._unfinished.values() if one.heard + self._expire_s <= now]

    def find(self, producer: str, chunk_id: bytes) -> Unfinished[P] | None:
        """The message, if chunks of it are missing."""
        return self._unfinished.get((producer, chunk_id))

    def touch(self, message: Unfinished[P], now: float) -> None:
        """It is waited for anew."""
        if self._unfinished.pop(message.key, None) is not None:
            message.heard = now
            self._unfinished[message.key] = message

    def remove(self, message: Unfinished[P]) -> None:
        """The message is not wanted any more."""
        self._unfinished.pop(message.key, None)

    def _no_room(self, key: Key, places: list[P], message: Unfinished[P] | None = None) -> LetGo[P]:
        self._given_back.pop(key, None)
        self._given_back[key] = None
        if len(self._given_back) > MAX_GIVEN_BACK:
            del self._given_back[next(iter(self._given_back))]
        return LetGo(f"more than {self._max_messages} messages were unfinished", key, places, message)

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        assert len(self._unfinished) <= self._max_messages
        assert len(self._given_back) <= MAX_GIVEN_BACK
        heard = [one.heard for one in self._unfinished.values()]
        assert heard == sorted(heard), "the one that has waited longest is the first"
        for key, one in self._unfinished.items():
            assert one.key == key
            assert one.next_index > 0
            assert not one.finished
            assert len(one.places) >= one.next_index
            assert one.too_large == (self._holds and one.size > self._max_bytes)
            held = 0 if one.too_large or not self._holds else one.size
            assert sum(map(len, one.pieces)) == held
