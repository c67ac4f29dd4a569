"""`magnetar cluster recover-ledger`: closes a ledger; where its end cannot be proved, shows what is known, accepts a loss.

In a cluster the metadata is on ZooKeeper. A service with a store of its own is stopped first: its data directory is opened
here, with its bookie (`magnetar standalone`), or with the bookies that it lists (`magnetar broker --bookies`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, NamedTuple

from magnetar.ledger import LedgerClient, LedgerMetadata, StaticBookies
from magnetar.ledger.recovery_survey import EndSurvey
from magnetar.proto.errors import InvalidArgument, MagnetarError, QuorumLost
from magnetar.proto.ledger_entry import NO_ENTRY
from magnetar.proto.ranges import Range, RangeSet

from ..terminal.session import EXIT_FAILED, confirm, fail, print_json
from ..terminal.tables import print_table
from ..wiring.components import broker_components, service_components
from ..wiring.daemons import parse_bookies
from ..wiring.metadata import open_store
from ..wiring.settings import ServiceSettings, SettingSources, service_settings
from ..wiring.shared_metadata import open_ledgers
from ..wiring.standalone import Standalone, connect_bookies, ledger_client, lock_data, open_metadata


class Place(NamedTuple):
    """Where the metadata is: on ZooKeeper, or in the data directory of a service that is stopped."""

    metadata: str
    data: str
    bookies: Sequence[str]
    config: str | None
    assignments: Sequence[str]

    def settings(self) -> ServiceSettings:
        """As the service has them. InvalidSetting."""
        return service_settings(SettingSources.of_options(self.data, self.config, self.assignments))


async def recover(place: Place, ledger_id: int, *, accept_loss: int | None, yes: bool, as_json: bool) -> None:
    """See the command."""
    async with _ledgers(place) as client:
        try:
            await client.open(ledger_id, recover=True)
        except QuorumLost as error:
            survey = await client.survey_end(ledger_id)
            _show(ledger_id, survey, error.message, as_json=as_json)
            if accept_loss is None:
                raise SystemExit(EXIT_FAILED) from None
            await _accept(client, ledger_id, survey, accept_loss, yes)
        closed = (await client.open(ledger_id, recover=False)).metadata
    _show_closed(ledger_id, closed, as_json=as_json)


async def _accept(
    client: LedgerClient, ledger_id: int, survey: EndSurvey, last_entry: int, yes: bool
) -> None:
    if last_entry != survey.last_entry:
        fail(
            f"entry {last_entry} is not the last one that is proved: the bookies that answer prove entry "
            f"{survey.last_entry}. Nothing was changed"
        )
    lost = f"{len(survey.undecided)} entries before it, and " if survey.undecided else ""
    question = (
        f"Close ledger {ledger_id} after entry {last_entry}, and give up {lost}whatever may have followed?"
    )
    refusal = "this gives up what may have been confirmed: say --yes"
    await asyncio.to_thread(confirm, question, yes, refusal=refusal)
    await client.accept_loss(ledger_id, last_entry)


@contextlib.asynccontextmanager
async def _ledgers(place: Place) -> AsyncIterator[LedgerClient]:
    settings = place.settings()
    if not place.data:
        if not place.metadata:
            raise InvalidArgument(
                "recover-ledger needs the metadata: --metadata zk://host:port/root of a cluster, or --data DIR of a service "
                "that is stopped"
            )
        async with open_store(place.metadata, 0.0) as store, AsyncExitStack() as stops:
            yield await open_ledgers(settings, broker_components(), store, stops)
        return
    if place.bookies:
        async with AsyncExitStack() as stops:
            components = broker_components()
            lock_data(components.files, settings, stops)
            metadata = open_metadata(components, settings, _failed, stops)
            listed = StaticBookies(parse_bookies(place.bookies))
            transport = await connect_bookies(listed, settings, components, metadata, "operator", stops)
            yield ledger_client(settings, components, metadata, transport, listed, stops)
        return
    # Nobody is meant to connect, and the port may be another service's by now.
    service = Standalone(
        replace(settings, daemon=replace(settings.daemon, bookie_port=0)),
        service_components(),
        on_failure=_failed,
    )
    client = await service.start_ledgers()
    try:
        yield client
    finally:
        await service.close()


def _failed(error: MagnetarError) -> None:
    fail(error.message)


def _show(ledger_id: int, survey: EndSurvey, reason: str, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "ledger": ledger_id,
                "state": survey.metadata.state.name,
                "reason": reason,
                "last_add_confirmed": survey.last_add_confirmed,
                "last_entry_proved": survey.last_entry,
                "end_is_proved": survey.proved,
                "undecided": _ranges(survey.undecided),
                "bookies": [
                    {
                        "id": bookie.bookie,
                        "error": bookie.error,
                        "last_add_confirmed": bookie.last_add_confirmed,
                        "found": _ranges(bookie.found),
                        "denied": _ranges(bookie.denied),
                        "unknown": _ranges(bookie.unknown),
                    }
                    for bookie in survey.bookies
                ],
            }
        )
        return
    print(f"ledger {ledger_id} cannot be closed: {reason}")
    heard = survey.last_add_confirmed
    print(f"last add confirmed, as far as is known: {heard if heard != NO_ENTRY else 'none'}")
    rows = [
        (
            bookie.bookie,
            "" if bookie.last_add_confirmed == NO_ENTRY else str(bookie.last_add_confirmed),
            _text(bookie.found),
            _text(bookie.denied),
            _text(bookie.unknown),
            bookie.error,
        )
        for bookie in survey.bookies
    ]
    columns = ("bookie", "heard of", "has", "never had", "does not say", "why")
    print_table(f"entries behind it, on the last ensemble of ledger {ledger_id}", columns, rows)
    if survey.undecided:
        print(
            f"nobody who answers has {_text(survey.undecided)}, and nobody can say that they were never confirmed: readers "
            "will find them lost (broker.unreadable_entry_policy=skip passes over them)"
        )
    end = survey.last_entry
    print(
        f"The last entry that is proved is {end if end != NO_ENTRY else '-1 (none)'}. Bring the bookies back that do not "
        "answer; a bookie that was emptied is unknown until its ledgers are repaired. If that cannot be, stop whoever may "
        "still write to the ledger, and accept that whatever followed is lost:\n"
        f"    magnetar cluster recover-ledger {ledger_id} --accept-loss {end}"
    )


def _show_closed(ledger_id: int, closed: LedgerMetadata, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "ledger": ledger_id,
                "state": closed.state.name,
                "last_entry": closed.last_entry,
                "length": closed.length,
            }
        )
    elif closed.last_entry == NO_ENTRY:
        print(f"ledger {ledger_id} is closed, and empty")
    else:
        print(f"ledger {ledger_id} is closed after entry {closed.last_entry}, {closed.length:,} bytes")


def _text(entries: Any) -> str:
    """`3-7, 9`."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in _ranges(entries))


def _ranges(entries: Iterable[int]) -> list[Range]:
    return list(RangeSet((entry_id, entry_id) for entry_id in entries))
