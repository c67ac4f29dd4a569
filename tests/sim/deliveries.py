"""What one subscription handed out and took back, and the rules for that (CORRECTNESS.md, rules 26, 28, 30, 32, 34).

    handed out --acknowledged--> done          with a receipt: never comes again
       |  `------nacked, timed out, its consumer gone-----> handed out again, with a redelivery count that never goes back
       `--delivered too often--> dead letter   no copy, no acknowledgement

Order is checked at every moment. Of first occurrences: by producer (exclusive, failover) or by key (key_shared). Of what
comes again, exclusive and failover: an *attachment*, the time during which the broker knows a consumer and holds its place
for it, hands out in order what is not acknowledged, without a gap. Of key_shared: no two consumers *hold* a key at once. A
consumer certainly holds a message from its handing out until it acknowledges it, if the receipt comes in this attachment
and nobody, itself in an earlier one included, had acknowledged it before.

What clients see is all that is known here, so each rule says what must be excused: an acknowledgement without a receipt may
be lost or not, and after a seek nobody knows which acknowledgements of others it overtook. Behind a seek a message may be
missing that began before the seek's target: with messages in chunks, where each began is looked up in the end.

Pulsar's clients acknowledge cumulatively what lies before a message, the first chunks of others among it whose last ones lie
behind: these are *cut*. A consumer that has all of their chunks hands them out; nobody gets them again (the native client
holds such an acknowledgement back).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from magnetar.client.chunked_id import last_place
from magnetar.proto.ids import MessageId

Name = tuple[str, int]

# A delivery that was on its way when the receipt was given may still arrive; later ones were sent after it.
RECEIPT_GRACE_S = 1.0
# Of each key: holds that later ones are compared with.
REMEMBERED_HOLDS = 50


class Violation(AssertionError):
    """A rule was broken; the message names it."""


class Hold(NamedTuple):
    """Since when, in which attachment, after how many seeks: a later one takes it back, and nobody tells the consumer."""

    since: float
    attachment: int
    seeks: int


@dataclass(eq=False)
class Holder:
    """A consumer, as its application sees it. `attachment` rises whenever the broker takes back what it holds."""

    name: str
    attachment: int = 0
    # What is to be handed out again in the attachment of that number, in order; of exclusive and failover.
    again: deque[MessageId] = field(default_factory=deque)
    again_of: int = -1
    seeks: int = 0  # of the subscription, before this attachment began
    attached: float = 0.0  # since when it may have been
    held: dict[MessageId, Hold] = field(default_factory=dict)

    def detached(self, subscription: Subscription, now: float) -> None:
        """The broker takes back what it holds."""
        self.attachment += 1
        self.seeks = subscription.seeks
        self.attached = now


class Seen(NamedTuple):
    """A redelivery count: who saw it, attached since when, and when."""

    redelivery_count: int
    holder: Holder
    attached: float
    at: float


class PassedOver(NamedTuple):
    """A message that did not come in order: it began before `floor`, where a seek went, or is cut at one of `cuts`."""

    name: Name
    floor: MessageId | None
    cuts: list[MessageId]


@dataclass(eq=False)
class Attempt:
    """An acknowledgement; id and name of each message. `quietly`: without a receipt."""

    holder: Holder
    attachment: int
    seeks: int
    started: float
    messages: list[tuple[MessageId, Name]]
    held: dict[MessageId, Hold]
    quietly: bool = False


class Subscription:
    """See the module docstring. `now` is virtual seconds; methods raise Violation at once."""

    def __init__(
        self, name: str, type: str, keys_in_order: int, *, max_redeliver_count: int | None = None
    ) -> None:
        """`keys_in_order`: first occurrences come in order of each of so many keys of a producer; 0: not at all."""
        self.name = name
        self.type = type
        self.max_redeliver_count = max_redeliver_count  # above it: a dead letter, which nobody is handed
        self.delivered: dict[Name, MessageId] = {}  # first delivery of each
        self.acknowledged: dict[Name, None] = {}  # with or without receipt
        self.redeliveries = 0
        self.receipts: dict[MessageId, float] = {}  # id -> when its receipt came
        self.seeks = 0
        self.chunks = False  # there are messages in chunks: a seek may go behind the first one of a message that is coming
        self._passed_over: list[PassedOver] = []
        self.floor: MessageId | None = None  # where the last seek went
        self.delayed: Container[Name] = ()  # which come in no order
        self._keys_in_order = keys_in_order
        self._in_order = type in ("exclusive", "failover")
        self._last_number: dict[Name, int] = {}  # highest number delivered, by producer and key
        self._unseen: dict[Name, None] = {}  # passed over: they must turn up among the dead letters
        self._cumulative: tuple[MessageId, float] | None = None  # highest cumulative receipt
        self._open: dict[MessageId, None] = {}  # handed out, and nobody has tried to acknowledge it
        self._tried_by: dict[MessageId, Holder | None] = {}  # who acknowledged it first; None: several
        # Whose effect may still come, and be seen behind a seek: a client sends them again when it has lost its broker.
        self._under_way: list[Attempt] = []
        self._tried_up_to: MessageId | None = None  # the highest that somebody acknowledged cumulatively
        self._cuts: list[MessageId] = []  # where messages in chunks may be cut, since the last seek
        self._holds: dict[Name, list[tuple[float, float, Holder]]] = {}  # by producer and key
        self._counts: dict[MessageId, list[Seen]] = {}
        self._crashes: list[tuple[float, float]] = []  # when, and until when all changes were durable
        self._durable_until = 0.0
        self._mark_delete: tuple[int, ...] = ()
        self._seeking = 0
        self._since_seek: list[tuple[Holder, MessageId, Name, int, int, float]] = []
        # Acknowledged while a seek was under way: perhaps behind it.
        self._tried_since_seek: dict[MessageId, None] = {}
        self._excused: dict[Name, None] = {}  # a seek may have overtaken their acknowledgements
        self._epoch = 0

    # --- deliveries --------------------------------------------------------------------------------------------------

    def handed_out(
        self,
        holder: Holder,
        message_id: MessageId,
        name: Name,
        *,
        count: int,
        epoch: int,
        now: float,
        failed_sends: dict[Name, str],
        arrived: float | None = None,
    ) -> None:
        """A consumer got a message from the topic, which may have waited in its queue since `arrived`.

        `failed_sends` may not be there at all.
        """
        if epoch < self._epoch and holder.seeks < self.seeks and self.type != "exclusive":
            # From before a seek of another consumer, which this one does not know of yet: epochs of a broker are its own.
            self.delivered.setdefault(name, message_id)
            return
        if self._seeking:
            self._since_seek.append((holder, message_id, name, count, epoch, now))
            self.delivered.setdefault(name, message_id)
            return  # from before the seek or from after it: `sought` will know
        receipt = self.receipts.get(message_id)
        if self._cumulative is not None and last_place(message_id) <= self._cumulative[0]:
            receipt = min(receipt or now, self._cumulative[1])
        arrived = now if arrived is None else arrived
        if receipt is not None and arrived > receipt + RECEIPT_GRACE_S:
            raise Violation(
                f"{self.name} got {name} ({message_id}) at {arrived:.3f}, acknowledged with receipt at {receipt:.3f}"
            )
        self._check_count(holder, message_id, name, count, now)
        if name in self.delivered:
            self.redeliveries += 1
        else:
            self.delivered[name] = message_id
        if self._keys_in_order and name not in self.delayed:
            self._first_in_order(message_id, name, failed_sends)
        if self._in_order:
            self._again_in_order(holder, message_id, name)
        tried = self._tried_up_to is not None and last_place(message_id) <= self._tried_up_to
        if message_id not in self._tried_by and not tried and not is_cut(message_id, self._cuts):
            self._open[message_id] = None
        if message_id in self._tried_by:  # that may take effect at any moment, and free the key
            holder.held.pop(message_id, None)
        else:
            holder.held[message_id] = Hold(now, holder.attachment, self.seeks)

    def _first_in_order(self, message_id: MessageId, name: Name, failed_sends: dict[Name, str]) -> None:
        begun = (name[0], name[1] % self._keys_in_order) in self._last_number
        gap = next_in_order(self._last_number, name, self._keys_in_order)
        if self.seeks and not begun and not self._in_order:
            return  # some keys had come further than others: where this one goes on after the seek is not known
        missing = [
            one
            for one in gap
            if not any(
                one in where
                for where in (failed_sends, self.delayed, self._excused, self.delivered, self.acknowledged)
            )
        ]
        if not missing:
            return
        if self.chunks and (self.floor is not None or self._cuts):
            # Where those are that nobody has confirmed or been handed yet will be known in the end: `check_passed_over`.
            self._passed_over += [PassedOver(one, self.floor, self._cuts) for one in missing]
            return
        if self.max_redeliver_count is not None:
            # Given up by consumers that died before their applications saw it.
            self._unseen.update(dict.fromkeys(missing))
            return
        raise Violation(
            f"{self.name} at {message_id} got {name} as first occurrence although {missing[:5]} did not come before it"
        )

    def _again_in_order(self, holder: Holder, message_id: MessageId, name: Name) -> None:
        if holder.again_of != holder.attachment:
            holder.again_of = holder.attachment
            holder.again = deque(sorted(self._open, key=last_place))
        again = holder.again
        while again and (again[0] not in self._open or again[0] == message_id):
            again.popleft()
        if again and last_place(again[0]) < last_place(message_id):
            raise Violation(
                f"{self.name}: {holder.name} got {name} ({message_id}) before {again[0]}, which is not acknowledged"
            )

    def _check_count(self, holder: Holder, message_id: MessageId, name: Name, count: int, now: float) -> None:
        if self.max_redeliver_count is not None and count > self.max_redeliver_count:
            raise Violation(f"{self.name} got {name} ({message_id}), a dead letter: redelivery count {count}")
        seen = self._counts.setdefault(message_id, [])
        # What another consumer was sent may have been under way for long.
        lowest = max((self._lowest_after(one, holder) for one in seen if one.holder is holder), default=0)
        if count < lowest:
            raise Violation(
                f"{self.name}: {holder.name} got {name} ({message_id}) again with the redelivery count {count}, "
                f"below {lowest}"
            )
        seen.append(Seen(count, holder, holder.attached, now))

    def _lowest_after(self, seen: Seen, holder: Holder) -> int:
        """The least redelivery count of a message that was handed out so, and comes again.

        Within an attachment it does so after a nack, which counts. A connection that is lost may lose the report of a
        hand-out that was on its way; and a failover consumer that is active anew gets again what it had.
        """
        # It may be handed out when the broker that sent it is dead already.
        crash = next((crash for crash in self._crashes if crash[0] >= seen.attached), None)
        if crash is None:
            nacked = seen.attached == holder.attached and self.type != "failover"
            return seen.redelivery_count + nacked
        return seen.redelivery_count if seen.at < crash[1] else 0  # it was durable, or may be forgotten

    # --- acknowledgements --------------------------------------------------------------------------------------------

    def acknowledging(
        self, holder: Holder, messages: list[tuple[MessageId, Name]], now: float, *, quietly: bool = False
    ) -> Attempt:
        """An application acknowledges; `receipt` follows unless it does so quietly."""
        held: dict[MessageId, Hold] = {}
        for message_id, name in messages:
            self.acknowledged[name] = None
            self._open.pop(message_id, None)
            if self._seeking:
                self._tried_since_seek[message_id] = None
            self._tried(message_id, holder)
            hold = holder.held.pop(message_id, None)
            if hold is not None:
                held[message_id] = hold
        attempt = Attempt(holder, holder.attachment, self.seeks, now, messages, held, quietly)
        self._under_way.append(attempt)
        return attempt

    def _tried(self, message_id: MessageId, holder: Holder) -> None:
        if self._tried_by.setdefault(message_id, holder) is not holder:
            self._tried_by[message_id] = None

    def acknowledging_up_to(
        self, holder: Holder, message_id: MessageId, now: float, *, cuts: bool = False
    ) -> Attempt:
        """The same of everything up to a message: a message in chunks stands where its last one does.

        `cuts`: as Pulsar's clients do, those that begin before it and end behind it are cut.
        """
        last = last_place(message_id)
        self._tried_up_to = max(self._tried_up_to or last, last)
        if cuts:
            self._cuts.append(last)
        for other in [other for other in self._open if (other if cuts else last_place(other)) <= last]:
            del self._open[other]
        if self._seeking:
            since = [its for _, its, *_ in self._since_seek if last_place(its) <= last]
            self._tried_since_seek.update(dict.fromkeys(since))
        for name, its in self.delivered.items():
            if last_place(its) <= last:
                self.acknowledged[name] = None
        return Attempt(holder, holder.attachment, self.seeks, now, [], {})

    def receipt(self, attempt: Attempt, now: float) -> None:
        """The receipt of an acknowledgement came: what its consumer acknowledged quietly before it has had its effect."""
        if attempt in self._under_way:
            place = self._under_way.index(attempt)
            self._under_way = [
                one
                for number, one in enumerate(self._under_way)
                if number > place or not (one is attempt or (one.quietly and one.holder is attempt.holder))
            ]
        if attempt.seeks != self.seeks or self._seeking:
            return  # which of the two came first is not known
        self._durable_until = max(self._durable_until, attempt.started)
        for message_id, name in attempt.messages:
            self.receipts.setdefault(message_id, now)
            hold = attempt.held.get(message_id)
            if (
                hold is not None
                and self.type == "key_shared"
                and hold.attachment == attempt.attachment == attempt.holder.attachment
                and hold.seeks == attempt.seeks
                and self._tried_by[message_id] is attempt.holder
            ):
                self._check_hold(name, message_id, hold.since, attempt.started, attempt.holder)

    def receipt_up_to(self, attempt: Attempt, message_id: MessageId, now: float) -> None:
        """The receipt of a cumulative acknowledgement came."""
        self.receipt(attempt, now)
        if attempt.seeks == self.seeks and not self._seeking:
            last = last_place(message_id)
            if self._cumulative is None or last > self._cumulative[0]:
                self._cumulative = (last, now)

    def given_back(self, holder: Holder, message_id: MessageId) -> None:
        """Nacked, or left to its acknowledgement timeout: it is not known any more how long the consumer holds it."""
        holder.held.pop(message_id, None)

    def _check_hold(
        self, name: Name, message_id: MessageId, since: float, until: float, holder: Holder
    ) -> None:
        key = (name[0], name[1] % self._keys_in_order)
        holds = self._holds.setdefault(key, [])
        for start, end, other in holds:
            if other is not holder and start < until and since < end:
                raise Violation(
                    f"{self.name}: {holder.name} held {name} ({message_id}) from {since:.3f} to {until:.3f}, and "
                    f"{other.name} another message of its key from {start:.3f} to {end:.3f}"
                )
        holds.append((since, until, holder))
        del holds[:-REMEMBERED_HOLDS]

    # --- seeks, crashes, figures -------------------------------------------------------------------------------------

    def seek_begins(self) -> None:
        """From here on the cursor may have moved."""
        self._seeking += 1
        self._since_seek.clear()

    def sought(self, position: MessageId, epoch: int, known: dict[Name, MessageId]) -> None:
        """A seek is done: everything from `position` on comes, and nothing before it. `known`: ids of confirmed messages."""
        self._seeking -= 1
        self.seeks += 1
        self.floor = position
        self._epoch = epoch
        self.receipts.clear()
        self._cumulative = None
        self._mark_delete = ()
        self._counts.clear()
        self._open.clear()
        self._holds.clear()
        # What lies before the position is passed over now, written as a dead letter or not; the rest comes again.
        self._unseen.clear()
        if self.type != "exclusive":  # those of other consumers may arrive behind the seek, or before it
            self._excused.update(self.acknowledged)
        else:
            self._cuts = []  # not cleared: what was passed over refers to it
        self._tried_by.clear()
        for attempt in self._under_way:
            for message_id, _ in attempt.messages:
                self._tried(message_id, attempt.holder)
        self._tried_up_to = None
        self.acknowledged.clear()
        self._last_number.clear()
        for name, message_id in {**known, **self.delivered}.items():
            if message_id < position and not message_id.is_duplicate:
                self.acknowledged[name] = None
                if self._in_order:
                    self._last_number[name[0], 0] = max(self._last_number.get((name[0], 0), -1), name[1])
        self.delivered = {name: its for name, its in self.delivered.items() if its < position}
        since, self._since_seek = self._since_seek, []
        for holder, message_id, name, count, its_epoch, at in since:
            holder.held.pop(message_id, None)
            if its_epoch >= epoch:
                self.handed_out(
                    holder, message_id, name, count=count, epoch=its_epoch, now=at, failed_sends={}
                )
        for message_id in self._tried_since_seek:
            self._open.pop(message_id, None)
        if not self._seeking:
            self._tried_since_seek.clear()

    def crashed(self, now: float) -> None:
        """The service died: what it had not made durable is forgotten."""
        self._crashes.append((now, self._durable_until))

    @property
    def moves(self) -> tuple[int, int]:
        """For `observed_mark_delete`: what must not have changed since the figures were asked for."""
        return self.seeks, self._seeking

    def observed_mark_delete(self, mark: tuple[int, ...], moves: tuple[int, int]) -> None:
        """What the service tells of itself, asked for when `moves` was that."""
        if self._seeking or moves != self.moves:
            return
        if mark < self._mark_delete:
            raise Violation(f"mark-delete of {self.name} went from {self._mark_delete} to {mark}")
        self._mark_delete = mark

    # --- the end -----------------------------------------------------------------------------------------------------

    def lacks(self, confirmed: dict[Name, MessageId]) -> list[Name]:
        """Messages that it has not handed out, and should have. Where there are dead letters, `check_letters` knows."""
        if self.max_redeliver_count is not None:
            return []
        return [name for name in self._to_be_done(confirmed) if name not in self.delivered]

    def _to_be_done(self, confirmed: dict[Name, MessageId]) -> Iterator[Name]:
        """Messages that nobody has acknowledged, and that no seek has passed over."""
        for name, message_id in confirmed.items():
            if name not in self.acknowledged and name not in self._excused:
                if not is_cut(message_id, self._cuts) and (self.floor is None or message_id >= self.floor):
                    yield name

    def check_passed_over(self, places: dict[Name, MessageId]) -> None:
        """Only what is cut, or began before a seek's target, may be missing. `places`: of all whose place is known."""
        wrong = [
            one
            for one in self._passed_over
            if (place := places.get(one.name)) is not None
            and (one.floor is None or place >= one.floor)
            and not is_cut(place, one.cuts)
        ]
        if self.max_redeliver_count is not None:
            # given up before anybody saw them: they are among the letters
            self._unseen.update(dict.fromkeys(one.name for one in wrong))
        elif wrong:
            name, floor, _ = wrong[0]
            where = "" if floor is None else f" behind a seek to {floor}"
            raise Violation(
                f"{self.name}: {name} at {places[name]} and {len(wrong) - 1} others did not come in order{where}"
            )

    def check_letters(self, letters: Container[Name], confirmed: dict[Name, MessageId]) -> None:
        """Nothing is left in any backlog: what nobody acknowledged is a dead letter."""
        lost = [name for name in self._to_be_done(confirmed) if name not in letters]
        lost += [name for name in self._unseen if name in confirmed and name not in letters]
        if lost:
            raise Violation(
                f"{self.name}: nobody acknowledged {lost[:5]}, which are not among the dead letters"
            )


def is_cut(message_id: MessageId, cuts: Iterable[MessageId]) -> bool:
    """A message in chunks of which some lie up to one of `cuts`, and others behind it."""
    last = last_place(message_id)
    return message_id < last and any(message_id <= cut < last for cut in cuts)


def next_in_order(last: dict[Name, int], name: Name, keys: int) -> list[Name]:
    """Notes a number of a producer; those between the highest before it of its key and itself. Nothing for an older one."""
    producer, number = name
    lane = (producer, number % keys)
    highest = last.get(lane, lane[1] - keys)
    if number <= highest:
        return []  # a duplicate, or this would not be the first occurrence
    last[lane] = number
    return [(producer, between) for between in range(highest + keys, number, keys)]
