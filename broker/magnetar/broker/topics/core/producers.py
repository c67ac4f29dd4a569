"""The producers of one topic: who may publish, under which name; without I/O.

A session is one epoch of a name on one connection. Whoever wants to publish has a `Claim`, and calls `open` until it has a
session; what `open` says to do first depends on the access mode of the claim, and then on the session that its name has.

Access: what a claim finds in its way, and what becomes of it. An *exclusive* session is one that was let in alone.

    access mode              in its way                                    then
    shared                   an exclusive session; claims that wait        Ask; if they are still there: ProducerBusy
    exclusive                any session; claims that wait                 Ask; if they are still there: ProducerFenced
    wait_for_exclusive       any session; claims that wait before it       Ask; if they are still there: Queued, in order
    exclusive_with_fencing   any session; claims that wait                 all of them are fenced
    (who is refused)         only a claim to which the place belongs       TopicBusy: it may be given up before it is in
    (all but shared)         the topic has another epoch than it knows     ProducerFenced, before anybody is disturbed
    (all but shared)         nothing: the place is its own from here on    Wait for what is queued; StoreEpoch; a session

Who comes back after its connection was lost, or its topic was moved, finds no claims in its way that wait: a shared one says
so by an epoch above 0, one that was let in alone by its `topic_epoch`. If the topic still has that epoch, its own old
session is not in its way either; if anything else is, it is not alone any more: ProducerFenced. `reserved_until` leaves them
time to come back before somebody who waits has the place.

Names, for claims of the mode shared:

    its session             a claim with a higher epoch       a claim with the same or a lower epoch
    none                    a new session                     a new session
    OPEN, FAILED            it is fenced, then as CLOSED      Ask its connection; if it is still there: ProducerBusy
    CLOSED, groups queued   Wait for them; too long: QuorumLost
    CLOSED                  a new session, whose epoch is higher

    OPEN --> FAILED   a group could not be stored: it and all later ones of this epoch are refused
    OPEN, FAILED --> CLOSED   closed by its connection, or fenced by a newer epoch

Rule 33: a newer session of a name is let in only when nothing that was queued under the old one can still land, so that
groups which are sent again never fall behind stale ones; one that is to be alone, when nothing of anybody can. A name
outlives its connection for that: it is forgotten when its session is closed and nothing of it is queued any more.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, Protocol

from magnetar.proto.batch_extensions import Chunk
from magnetar.proto.errors import (
    MagnetarError,
    ProducerBusy,
    ProducerFenced,
    QuorumLost,
    TopicBusy,
    TopicNotServed,
)

from ...dispatch.core.consumer import Peer
from ...resources.moving_rates import MovingRates
from .deduplication import Pushed

_log = logging.getLogger(__name__)

ReceiptFields = tuple[int, int, int, int, int]


MAX_NAMED = 3  # producers that an error names
NOT_ALONE = -1  # in place of a topic's epoch
ANYTHING = Chunk(b"", 0, last=False)  # no session has sent it


class AccessMode(NamedTuple):
    """What becomes of a claim when others are in its way: it `waits`, it `fences` them, or it is refused."""

    alone: bool  # nobody else publishes meanwhile
    waits: bool = False
    fences: bool = False


ACCESS_MODES = {
    "shared": AccessMode(alone=False),
    "exclusive": AccessMode(alone=True),
    "wait_for_exclusive": AccessMode(alone=True, waits=True),
    "exclusive_with_fencing": AccessMode(alone=True, fences=True),
}


class ProducerPort(Protocol):
    """What a listener implements for one session."""

    @property
    def peer(self) -> Peer:
        """Whose producer it is."""

    def receipts(self, rows: list[ReceiptFields]) -> None:
        """Groups that are durable, as the fields of a RECEIPT_ROW in sequence order; one call per wake-up."""

    def send_failed(self, sequence_id: int, error: MagnetarError) -> None:
        """The group that starts with `sequence_id` and all after it were not stored; called once per session."""

    def send_delayed(self, error: MagnetarError) -> None:
        """What was sent waits for this reason."""

    def hold(self, reason: str) -> None:
        """The producer is to send nothing more, for this reason; "": it goes on. What is on its way is taken."""

    def producer_closed(self, error: MagnetarError) -> None:
        """The broker ended the session; if the error may pass, to be opened again where the topic is then."""


class SessionState(enum.Enum):
    """See the module docstring."""

    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


class ProducerSession:
    """One epoch of one producer."""

    __slots__ = (
        "access_mode", "bytes_in", "confirmed_chunk", "epoch", "messages_in", "metadata", "name", "opened_ms", "outstanding",
        "port", "pushed", "rates", "rows", "state", "topic_epoch", "when_drained",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        epoch: int,
        port: ProducerPort,
        access_mode: str = "shared",
        topic_epoch: int = NOT_ALONE,
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.port = port
        self.access_mode = access_mode
        self.topic_epoch = topic_epoch  # under which it was let in alone; NOT_ALONE: it is one of several
        self.state = SessionState.OPEN
        self.messages_in = 0
        self.bytes_in = 0
        self.rates = MovingRates(2)  # messages and bytes in
        self.opened_ms = 0
        self.metadata: Mapping[str, str] = {}  # that its program noted, for people
        # What was taken of it, by sequence id; None: nothing is deduplicated.
        self.pushed: Pushed | None = None
        # Receipt runs queued or appended, neither confirmed nor failed yet.
        self.outstanding = 0
        # Rows of this wake-up, collected by the topic.
        self.rows: list[ReceiptFields] = []
        # What was stored of it last, if that is a chunk; ANYTHING: nothing yet, so it may go on with any message.
        self.confirmed_chunk: Chunk | None = ANYTHING
        # Called once when `outstanding` is 0: nothing that was queued under this session can land any more.
        self.when_drained: list[Callable[[], None]] = []

    @property
    def last_sequence_id(self) -> int:
        """Messages up to this one are stored, as far as anybody knows; -1: nobody does."""
        return -1 if self.pushed is None else self.pushed.last

    def receipts(self, rows: list[ReceiptFields]) -> None:
        """Sends receipts. A port that fails costs its own producer only: it opens again, and sends again (rule 48)."""
        try:
            self.port.receipts(rows)
        except Exception as failure:
            _log.exception("producer %s: its receipts could not be sent, so that it is closed", self.name)
            self.end(TopicNotServed(f"receipts could not be sent: {failure!r}"))

    def delay(self, error: MagnetarError) -> None:
        """Tells the producer why it has no receipts yet, if it waits for any."""
        if self.outstanding and self.state is SessionState.OPEN:
            self.port.send_delayed(error)

    def hold(self, reason: str) -> None:
        """Until it is called with ""."""
        if self.state is SessionState.OPEN:
            self.port.hold(reason)

    def fail(self, sequence_id: int, error: MagnetarError) -> None:
        """Tells the producer once; what it sends later in this epoch is dropped."""
        if self.state is SessionState.OPEN:
            self.state = SessionState.FAILED
            try:
                self.port.send_failed(sequence_id, error)
            except Exception:  # as in `end`
                _log.exception("producer %s does not learn that its messages failed", self.name)

    @property
    def active(self) -> bool:
        """False once it is CLOSED."""
        return self.state is not SessionState.CLOSED

    def close(self) -> None:
        """Its connection ended, or it was closed: nothing more is taken, what is queued still lands."""
        self.state = SessionState.CLOSED

    def end(self, error: MagnetarError) -> None:
        """The broker closes it, and says why. A port that fails keeps neither the others nor the topic from ending."""
        self.close()
        try:
            self.port.producer_closed(error)
        except Exception:
            _log.exception("producer %s does not learn that it was closed", self.name)


def _nobody_waits() -> None: ...


@dataclass(slots=True, eq=False)
class Claim:
    """Somebody wants to be the producer of a name."""

    name: str
    epoch: int  # rises above that of every session of the name that was in the way
    access_mode: str = "shared"
    topic_epoch: int = NOT_ALONE  # under which it was let in alone before or, once stored, is now
    asked: list[ProducerSession] = field(default_factory=list)  # whose connections were asked
    awaited: ProducerSession | None = None  # the last one whose groups were waited for
    refused: MagnetarError | None = None  # somebody fenced it before it was let in
    # It is Queued: to be called when `open` may say something else.
    wake: Callable[[], None] = _nobody_waits


class Ask(NamedTuple):
    """The connections of these sessions may be dead: ask them, then `open` again."""

    sessions: list[ProducerSession]


class Wait(NamedTuple):
    """Wait until the session is drained, at most `drain_timeout_ms`, then `open` again."""

    session: ProducerSession


class Queued(NamedTuple):
    """The claim waits for its turn: `open` again when its `wake` is called, and at `until` (loop time) at the latest."""

    reason: str  # whom it waits for
    until: float | None = None


class StoreEpoch(NamedTuple):
    """Make a topic epoch durable that is higher than any before, call `epoch_stored` with it, then `open` again."""


class Producers:
    """The sessions of one topic, by producer name, and the claims that wait."""

    def __init__(self, topic: str, drain_timeout_ms: int) -> None:
        """`drain_timeout_ms`: how long a newer session of a name waits for the older one's groups."""
        self._topic = topic
        self.drain_timeout_ms = drain_timeout_ms
        self._by_name: dict[str, ProducerSession] = {}
        self.stopped: MagnetarError | None = None  # why nobody is let in any more
        self.topic_epoch = NOT_ALONE  # the last one that is durable
        # The claim to which the place belongs that is to be alone: nothing but its own waits keeps it from its session.
        self._entering: Claim | None = None
        self._alone: ProducerSession | None = None  # the exclusive session that was let in last
        self._waiting: dict[Claim, None] = {}  # in order of arrival
        # Until this loop time who waits leaves the place to those who had it last.
        self.reserved_until = 0.0

    def __len__(self) -> int:
        return sum(session.active for session in self._by_name.values())

    def __contains__(self, name: object) -> bool:
        """True if the name is connected, or something of it is on its way."""
        return name in self._by_name

    def __iter__(self) -> Iterator[ProducerSession]:
        return iter(list(self._by_name.values()))

    @property
    def waiting(self) -> int:
        """How many claims wait for exclusive access."""
        return len(self._waiting)

    def open(
        self, claim: Claim, new_port: Callable[[int], ProducerPort], now: float = 0.0
    ) -> ProducerSession | Ask | Wait | Queued | StoreEpoch:
        """See the module docstring; `new_port` gets the epoch, `now` is the loop's time.

        Raises ProducerBusy, ProducerFenced, TopicBusy, QuorumLost, or why it is `stopped`. A claim that gets no session in
        the end is to be withdrawn.
        """
        if self.stopped is not None:
            raise self.stopped
        if claim.refused is not None:
            raise claim.refused
        alone = ACCESS_MODES[claim.access_mode].alone
        if claim is not self._entering:
            if (
                first := self._access(claim, now) or (None if alone else self._name_in_use(claim))
            ) is not None:
                return first
            if alone:
                self._waiting.pop(claim, None)
                self._entering = claim
        return self._enter(claim, new_port, alone=alone)

    # --- access ------------------------------------------------------------------------------------------------------

    def _access(self, claim: Claim, now: float) -> Ask | Queued | None:
        """None: the claim may come in, as far as others are concerned."""
        mode = ACCESS_MODES[claim.access_mode]
        returns = claim.topic_epoch != NOT_ALONE if mode.alone else claim.epoch > 0
        if mode.alone and returns and claim.topic_epoch != self.topic_epoch:
            raise ProducerFenced(
                f"producer {claim.name!r} had topic {self._topic} for itself under epoch {claim.topic_epoch}, and the topic "
                f"has epoch {self.topic_epoch} now: another producer has taken its place"
            )
        # A shared one does not look at all the others: there may be thousands.
        others = [one for one in (self if mode.alone else filter(None, [self._alone])) if one.active]
        own = self._by_name.get(claim.name)
        if mode.alone and returns and own in others and claim.epoch > own.epoch:
            others.remove(own)
        before = [] if returns else list(takewhile(lambda one: one is not claim, self._waiting))
        if self._entering is not None:
            before.append(self._entering)
        # Who comes back fences nobody who has taken its place meanwhile, though that epoch is not known to be durable yet.
        if mode.fences and not (returns and self._entering is not None):
            self._fence(others, before, claim)
            return None
        waits = mode.waits and not returns
        if waits:  # what is still queued is waited for without an end, as all else
            others += [one for one in self if not one.active and one.outstanding]
        if not others and not before:
            if waits and now < self.reserved_until:
                self._waiting.setdefault(claim)
                left = f"producers of topic {self._topic} whose connections were lost may come back"
                return Queued(left, self.reserved_until)
            return None
        asked = [one for one in others if one.active and one not in claim.asked]
        if asked:
            claim.asked += asked
            return Ask(asked)
        reason = self._held_by(others, before)
        if waits:
            self._waiting.setdefault(claim)
            return Queued(reason)
        if not others and before == [self._entering]:  # it may be given up: its connection is lost, say
            raise TopicBusy(f"{reason}, which is being let in; try again")
        if not mode.alone:
            raise ProducerBusy(f"{reason}; close it, or wait until it has left")
        patient = [repr(name) for name, other in ACCESS_MODES.items() if other.waits or other.fences]
        raise ProducerFenced(f"{reason}; close it, or choose access_mode={' or '.join(patient)}")

    def _held_by(self, others: list[ProducerSession], before: list[Claim]) -> str:
        """Who is in the way, in words."""
        names = [f"producer {one.name!r} ({one.access_mode})" for one in others]
        names += [f"producer {one.name!r} (waits: {one.access_mode})" for one in before]
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return f"topic {self._topic} is in use by {', '.join(names[:MAX_NAMED])}{more}"

    def _fence(self, sessions: list[ProducerSession], claims: list[Claim], by: Claim) -> None:
        error = ProducerFenced(
            f"producer {by.name!r} has taken topic {self._topic} for itself ({by.access_mode})"
        )
        self._entering = by
        for claim in claims:
            self._waiting.pop(claim, None)
            claim.refused = error
            claim.wake()
        for session in sessions:
            session.end(error)
            self.finished(session, 0)

    def _enter(
        self, claim: Claim, new_port: Callable[[int], ProducerPort], *, alone: bool
    ) -> ProducerSession | Wait | StoreEpoch:
        """The name, or (`alone`) the topic, is the claim's own; rule 33, of all who had it before."""
        own = self._by_name.get(claim.name)
        for session in self if alone else filter(None, [own]):
            if session.active:  # its own, of an older epoch
                session.end(
                    ProducerFenced(f"producer {claim.name!r} was opened again with epoch {claim.epoch}")
                )
            if session is own:
                claim.epoch = max(claim.epoch, session.epoch + 1)
            if session.outstanding:
                return self._wait(claim, session)
        if alone and claim.topic_epoch == NOT_ALONE:
            return StoreEpoch()
        topic_epoch = claim.topic_epoch if alone else NOT_ALONE
        session = ProducerSession(
            claim.name, claim.epoch, new_port(claim.epoch), claim.access_mode, topic_epoch
        )
        if alone:
            self._entering, self._alone = None, session
            self.reserved_until = 0.0
        self._by_name[claim.name] = session
        return session

    def epoch_stored(self, claim: Claim, epoch: int) -> None:
        """The topic has this epoch now, and it is the claim's, if that is not fenced meanwhile."""
        self.topic_epoch = max(self.topic_epoch, epoch)
        claim.topic_epoch = epoch

    def withdraw(self, claim: Claim) -> None:
        """The claim gets no session: it failed, or nobody is there any more who wants it."""
        self._waiting.pop(claim, None)
        if self._entering is claim:
            self._entering = None
        self._wake_first()

    def _wake_first(self) -> None:
        first = next(iter(self._waiting), None)
        if first is not None:
            first.wake()

    # --- names -------------------------------------------------------------------------------------------------------

    def _name_in_use(self, claim: Claim) -> Ask | None:
        """None: no session of the name is in the claim's way, or one that its epoch fences."""
        old = self._by_name.get(claim.name)
        if old is None or not old.active or claim.epoch > old.epoch:
            return None
        if old in claim.asked:
            raise ProducerBusy(
                f"producer name {claim.name!r} is in use on topic {self._topic}; "
                "choose another name or close the other producer"
            )
        claim.asked.append(old)
        return Ask([old])

    def _wait(self, claim: Claim, old: ProducerSession) -> Wait:
        if claim.awaited is old:
            raise QuorumLost(
                f"what producer {old.name!r} of topic {self._topic} sent under epoch {old.epoch} was neither stored nor "
                f"refused within producer_drain_timeout_ms={self.drain_timeout_ms}: look whether enough bookies can be "
                "written to, and try again; a shared producer of another name does not wait"
            )
        claim.awaited = old
        return Wait(old)

    # --- endings -----------------------------------------------------------------------------------------------------

    def forget(self, session: ProducerSession, reserved_until: float = 0.0) -> None:
        """Closes the session; what it queued still lands, and its name is free after that.

        `reserved_until`: the connection was lost, and who waits leaves the producer until then to come back (loop time).
        """
        if session.active:
            if session.topic_epoch != NOT_ALONE and not reserved_until:
                self.reserved_until = 0.0
            self.reserved_until = max(self.reserved_until, reserved_until)
        session.close()
        self.finished(session, 0)

    def may_continue(self, name: str, chunk_id: bytes) -> bool:
        """True if another chunk of this message may follow those that are confirmed.

        Its producer sends nothing else until it has ended, and what it sends again begins with what is not confirmed.
        """
        session = self._by_name.get(name)
        if session is None:
            return False
        last = session.confirmed_chunk
        return session.state is not SessionState.OPEN or (
            last is not None and (last is ANYTHING or (last.chunk_id == chunk_id and not last.last))
        )

    def finished(self, session: ProducerSession, runs: int) -> None:
        """So many receipt runs of the session were confirmed or failed."""
        session.outstanding -= runs
        if session.outstanding:
            return
        if session.state is SessionState.CLOSED and self._by_name.get(session.name) is session:
            del self._by_name[session.name]
            self._wake_first()
        waiting, session.when_drained = session.when_drained, []
        for drained in waiting:
            drained()

    def stop(self, error: MagnetarError) -> None:
        """Nothing more is taken from anybody, nor anybody let in; what is queued still lands and is receipted."""
        self.stopped = error if error.retryable else TopicNotServed(error.message)
        for session in self._by_name.values():
            if session.state is SessionState.OPEN:
                session.state = SessionState.FAILED
        for claim in self._waiting:
            claim.wake()

    def close_all(self, error: MagnetarError, *, final: bool = False) -> None:
        """The topic ends here: every producer has to look it up again, or (`final`) it takes nothing more from anybody."""
        self.stop(error)
        self._end_sessions(error)
        self._by_name.clear()
        if final:
            self.stopped = error

    def resume(self, error: MagnetarError, reserved_until: float) -> None:
        """Ends a `stop`: what was sent meanwhile was dropped, so every producer opens and sends again.

        Who waits leaves the place until `reserved_until` (loop time) to those who have it.
        """
        self.stopped = None
        self.reserved_until = reserved_until
        self._end_sessions(error)

    def _end_sessions(self, error: MagnetarError) -> None:
        for session in self:
            if session.active:
                session.end(error)
                self.finished(session, 0)

    def check(self) -> None:
        """Asserts the invariants; tests call it after every event."""
        active = [one for one in self if one.active]
        alone = [one for one in active if one.topic_epoch != NOT_ALONE]
        assert not alone or len(active) == 1, "an exclusive producer is not alone"
        assert all(one.topic_epoch == self.topic_epoch for one in alone), "one of another epoch is alone"
        assert self._entering not in self._waiting
        assert all(claim.refused is None for claim in self._waiting)
