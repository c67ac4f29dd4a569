"""Reading ledgers: ranges from one replica when every bookie has every entry, in shares from several when striped.

Every entry is verified (digest, ledger, entry id); which replica is asked, and what when it is slow, is in `replicas`.
An open ledger is followed by long polls at some of its bookies, in order, until it is closed.

A poll asks a bookie to answer once it has heard of a last-add-confirmed above the one that is known here. That knowledge
comes with the next entry, or from the idle writer (rule 19); the entries behind it come with the answer if the bookie has
them. `POLLED` bookies of the last ensemble are asked at a time, so that one that is slow or hung costs nothing. A bookie
that fails, is fenced (answers at once, and will never hear of more) or comes back with nothing too soon rests for a while.

What wakes a waiting tail, none of which can get lost because each leaves its trace before the wake-up is sent:
* a poll that ended (its task is done and looked at before the next wait);
* a change of the ledger's metadata (closed, or other bookies), from a watch that is set before the metadata is read;
* the end of a pause, when no bookie is polled; then, and after a poll without news, metadata and the whole last ensemble are
  asked (rule 13), so that even a watch that was lost or two deaf bookies delay a reader by one poll only.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from magnetar.metadata.store import Watch
from magnetar.proto.errors import EntryNotFound, InvalidArgument, LedgerNotFound, MagnetarError
from magnetar.runtime.tasks import awaited, end_all

from .components import LedgerComponents
from .core.metadata import LedgerMetadata
from .core.quorum import LastConfirmedQuorum
from .replicas import Replicas, verified
from .transport import LongPollAnswer

POLLED = 2  # bookies at a time
POLL_S = 5.0
_POLL_ENTRIES = 1000
# Of a bookie that failed or is fenced; one without news was asked so long before it is asked again.
_REST_S = 1.0


class LedgerReader:
    """A ledger for reading; closed, or as far as it was confirmed. Made by LedgerClient.open."""

    def __init__(self, components: LedgerComponents, ledger_id: int, metadata: LedgerMetadata) -> None:
        self.ledger_id = ledger_id
        self.metadata = metadata
        self.last_add_confirmed = metadata.last_entry  # last entry that may be read; final once closed
        self._components = components
        self._replicas = Replicas(components, ledger_id)

    @property
    def closed(self) -> bool:
        """Whether the ledger will never have more entries."""
        return self.metadata.closed

    async def read(self, first: int, last: int, *, max_bytes: int = 0) -> list[bytes]:
        """Verified ledger entries from `first` on, without a gap and at least one.

        With `max_bytes` 0 all up to `last`; else about as many as fit, possibly fewer. EntryNotFound if `first` lies
        past last_add_confirmed; EntryDamaged, BookieUnavailable and others when no replica has a readable copy;
        LedgerNotFound if it was deleted.
        """
        if not 0 <= first <= last:
            raise InvalidArgument(f"entries {first}..{last} are not a range")
        if first > self.last_add_confirmed:
            raise EntryNotFound(
                f"ledger {self.ledger_id} has no entry {first}: it ends at {self.last_add_confirmed} so far",
                ledger_id=self.ledger_id,
                entry_id=first,
            )
        last = min(last, self.last_add_confirmed)
        try:
            return await self._replicas.read(self.metadata, first, last, max_bytes)
        except MagnetarError as error:
            # Bookies may tell of entries that were confirmed after an ensemble change that is not known here. And a bookie
            # that cannot be reached may have what the others deny: only the metadata tells that the ledger was deleted.
            if not await self._ensembles_changed(error):
                raise
        return await self._replicas.read(self.metadata, first, last, max_bytes)

    async def _ensembles_changed(self, error: MagnetarError) -> bool:
        """Reads the metadata after a failed read. LedgerNotFound; another failure leaves it at `error`."""
        ensembles = self.metadata.ensembles
        try:
            await self._read_metadata()
        except LedgerNotFound:
            raise
        except MagnetarError:
            raise error from None
        return self.metadata.ensembles != ensembles

    async def read_last_confirmed(self) -> int:
        """Looks how far the ledger goes now, and returns it. QuorumLost if too few bookies answer (rule 13)."""
        await self.read_metadata()
        if not self.closed:
            self.update_last_confirmed(await self._ask_ensemble())
        return self.last_add_confirmed

    async def read_metadata(self) -> None:
        """Looks whether the ledger was closed or changed its bookies. LedgerNotFound."""
        if not self.closed:
            await self._read_metadata()

    async def _read_metadata(self) -> None:
        self.metadata = (await self._components.records.read(self.ledger_id)).metadata
        if self.metadata.closed:
            self.last_add_confirmed = self.metadata.last_entry
        else:
            # What lies before an ensemble change was confirmed before it.
            self.update_last_confirmed(self.metadata.last_ensemble.first_entry - 1)

    def update_last_confirmed(self, last_add_confirmed: int) -> None:
        """Takes a last-add-confirmed that a bookie or the metadata reported; it never goes back."""
        if not self.closed:
            self.last_add_confirmed = max(self.last_add_confirmed, last_add_confirmed)

    def follow(self, first: int | None = None, *, max_bytes: int = 1 << 20) -> LedgerTail:
        """Entries from `first` on (None: past the last one confirmed now) as they are confirmed, until the ledger is closed.

            async with reader.follow(0) as tail:
                async for entries in tail: ...

        Several readers of one ledger cost their bookies a long poll each; closing the tail ends its polls.
        """
        first = self.last_add_confirmed + 1 if first is None else first
        if first < 0:
            raise InvalidArgument(f"entry {first} is not one to start from")
        return LedgerTail(self._components, self, first, max_bytes)

    async def wait(self, *, timeout_s: float) -> int:
        """Waits until more is confirmed than is known here, or the ledger is closed; returns last_add_confirmed.

        The same as before if nothing came within `timeout_s`. LedgerNotFound if it was deleted.
        """
        known = self.last_add_confirmed
        async with self.follow() as tail:
            await tail.wait(known, timeout_s)
        return self.last_add_confirmed

    async def _ask_ensemble(self) -> int:
        bookies = self.metadata.last_ensemble.bookies
        quorum = LastConfirmedQuorum(self.metadata.striping, bookies)
        ask = self._components.transport.read_last_confirmed
        tasks = {awaited(ask(bookie, self.ledger_id)): bookie for bookie in bookies}
        waiting = list(tasks)
        try:
            while not quorum.covered and not quorum.complete:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in waiting if task.done()]:
                    waiting.remove(task)
                    try:
                        quorum.answered(tasks[task], task.result().last_add_confirmed, 0)
                    except MagnetarError as error:
                        quorum.answered(tasks[task], -1, error.code)
        finally:
            await end_all(waiting)
        if not quorum.covered:
            raise quorum.lost(self.ledger_id)
        return quorum.last_add_confirmed


class LedgerTail:
    """An asynchronous iterator over lists of verified entries, without gaps. Made by LedgerReader.follow."""

    def __init__(
        self, components: LedgerComponents, reader: LedgerReader, first: int, max_bytes: int
    ) -> None:
        self.next_entry = first  # the entry that comes next
        self._components = components
        self._reader = reader
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._metadata_changed = True  # or was not read since the watch is set
        self._quiet = False  # a poll came back without news
        self._watch: Watch | None = None
        # bookie -> (last_add_confirmed it was asked with, when, the poll)
        self._polls: dict[str, tuple[int, float, asyncio.Task[LongPollAnswer]]] = {}
        self._rests: dict[str, float] = {}  # bookie -> loop time until which it is not polled
        self._turn = reader.ledger_id  # where the search for a bookie to poll begins
        self._came: list[bytes] = []  # entries from `next_entry` on that came with a poll

    @property
    def ended(self) -> bool:
        """Whether the ledger is closed and nothing is left."""
        return self._reader.closed and self.next_entry > self._reader.last_add_confirmed

    async def next(self, timeout_s: float | None = None) -> list[bytes]:
        """The next entries; none if none came within `timeout_s` (None: waits), or if the tail has `ended`.

        LedgerNotFound if the ledger was deleted; EntryDamaged and others as LedgerReader.read. May be called again after
        errors. What it had when it is cancelled comes with the next call.
        """
        reader = self._reader
        if self.next_entry > reader.last_add_confirmed:
            await self.wait(self.next_entry - 1, timeout_s)
        entries = self._came
        self._came = []
        if not entries:
            if self.next_entry > reader.last_add_confirmed:
                return []
            entries = await reader.read(self.next_entry, reader.last_add_confirmed, max_bytes=self._max_bytes)
        self.next_entry += len(entries)
        return entries

    async def wait(self, known: int, timeout_s: float | None = None) -> None:
        """Until more than `known` is confirmed, the ledger is closed, or for `timeout_s`."""
        deadline = None if timeout_s is None else self._loop.time() + timeout_s
        if self._watch is None:
            self._watch = self._components.records.watch(self._reader.ledger_id, self._changed)
        while True:
            self._woken.clear()
            self._take_poll_answers()
            if self._reader.last_add_confirmed > known or self._reader.closed:
                return
            if self._metadata_changed or self._quiet:
                await self._refresh()
                continue
            until = self._poll(known)
            if deadline is not None:
                if self._loop.time() >= deadline:
                    return
                until = deadline if until is None else min(until, deadline)
            await self._sleep(until)

    async def close(self) -> None:
        """Ends the polls."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
            self._metadata_changed = True
        polls = [task for _, _, task in self._polls.values()]
        self._polls.clear()
        await end_all(polls)

    async def __aenter__(self) -> LedgerTail:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> LedgerTail:
        return self

    async def __anext__(self) -> list[bytes]:
        entries = await self.next()
        if not entries:
            raise StopAsyncIteration
        return entries

    # --- what wakes it -----------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._metadata_changed = True
        self._woken.set()

    async def _sleep(self, until: float | None) -> None:
        if until is None:
            await self._woken.wait()
            return
        timer = self._loop.call_at(until, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()

    async def _refresh(self) -> None:
        """Reads metadata; after silence also what the last ensemble knows."""
        quiet, self._quiet, self._metadata_changed = self._quiet, False, False
        try:
            if quiet:
                await self._reader.read_last_confirmed()
            else:
                await self._reader.read_metadata()
        except BaseException as error:
            if isinstance(error, MagnetarError) and error.retryable and not isinstance(error, LedgerNotFound):
                return  # bookies or the store will be back: polls go on, and after a rest this is tried again
            # Cancelled, say: what woke it is still to be looked at.
            self._quiet, self._metadata_changed = self._quiet or quiet, True
            raise

    # --- polls -------------------------------------------------------------------------------------------------------

    def _poll(self, known: int) -> float | None:
        """Polls as many bookies as it should. Returns when to look again; None: polls are under way."""
        bookies = self._reader.metadata.last_ensemble.bookies
        now = self._loop.time()
        wakes: list[float] = []
        for step in range(len(bookies)):
            if len(self._polls) >= POLLED:
                return None
            bookie = bookies[(self._turn + step) % len(bookies)]
            if bookie in self._polls:
                continue
            rested = self._rests.get(bookie, 0.0)
            if rested > now:
                wakes.append(rested)
                continue
            task = awaited(
                self._components.transport.wait_last_confirmed(
                    bookie,
                    self._reader.ledger_id,
                    known,
                    timeout_s=POLL_S,
                    max_entries=_POLL_ENTRIES,
                    max_bytes=self._max_bytes,
                ),
                f"tail of ledger {self._reader.ledger_id} at bookie {bookie}",
            )
            task.add_done_callback(lambda _: self._woken.set())
            self._polls[bookie] = (known, now, task)
        if not self._polls:
            self._quiet = True  # no bookie can be polled: ask all of them when the first pause is over
        return min(wakes, default=None)

    def _take_poll_answers(self) -> None:
        reader, now = self._reader, self._loop.time()
        for bookie in [bookie for bookie, (_, _, task) in self._polls.items() if task.done()]:
            known, asked_at, task = self._polls.pop(bookie)
            try:
                answer = task.result()
            except MagnetarError as error:
                self._rests[bookie] = now + _REST_S
                self._turn += 1
                self._metadata_changed |= isinstance(error, LedgerNotFound)
                continue
            if answer.fenced:
                self._rests[bookie] = now + _REST_S
                self._metadata_changed = True
            if answer.last_add_confirmed <= known:
                if not answer.fenced:
                    self._rests[bookie] = asked_at + _REST_S
                    self._turn += 1
                    self._quiet = True
                continue
            reader.update_last_confirmed(answer.last_add_confirmed)
            if answer.entries and known + 1 == self.next_entry and not self._came:
                try:
                    ids = range(self.next_entry, self.next_entry + len(answer.entries))
                    self._came = verified(answer.entries, reader.ledger_id, ids, bookie)
                except MagnetarError:
                    self._came = []  # read from another replica
