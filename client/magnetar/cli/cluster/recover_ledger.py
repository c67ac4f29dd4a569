"""`magnetar cluster recover-ledger`: closes a ledger; where its end cannot be proved, shows what is known, accepts a loss.

In a cluster the metadata is on ZooKeeper. A service with a store of its own is stopped first: its data directory is opened
here, with its bookie (`magnetar standalone`), or with the bookies that it lists (`magnetar broker --bookies`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magnetar.proto.errors import InvalidArgument, MagnetarError, QuorumLost
from magnetar.proto.ledger_entry import NO_ENTRY
from magnetar.proto.ranges import Range, RangeSet

from ..terminal.command import Answer, command
from ..terminal.options import Yes
from ..terminal.session import EXIT_FAILED, confirm, fail
from ..terminal.tables import Table
from ..wiring.metadata import open_store
from ..wiring.settings import SettingSources, parse_bookies, service_settings

if TYPE_CHECKING:
    from magnetar.ledger import LedgerClient, LedgerMetadata
    from magnetar.ledger.recovery_survey import EndSurvey

    from ..wiring.settings import ServiceSettings

recover_app = typer.Typer()


@command(recover_app, "recover-ledger")
async def recover_ledger(
    ledger: Annotated[int, typer.Argument(help="The id of a ledger.", metavar="LEDGER", min=0)],
    metadata: Annotated[
        str,
        typer.Option(
            "--metadata",
            envvar="MAGNETAR_DAEMON_METADATA",
            help="The metadata that a cluster shares.",
            metavar="URL",
        ),
    ] = "",
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="Instead: data of a standalone service, or of a broker; it is stopped.",
            metavar="DIR",
        ),
    ] = "",
    bookies: Annotated[
        str,
        typer.Option(
            "--bookies", help="With --data of a broker: its bookies, as it has them.", metavar="LIST"
        ),
    ] = "",
    accept_loss: Annotated[
        int | None,
        typer.Option(
            "--accept-loss",
            min=-1,
            help="Where the end cannot be proved: close it after this entry, the last one that is proved, and give up what "
            "may have followed.",
            metavar="ENTRY",
        ),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="Settings in TOML.", metavar="FILE")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="As a daemon takes it.", metavar="SECTION.NAME=VALUE")
    ] = None,
    yes: Yes = False,
    as_json: bool = False,
) -> Answer:
    """Close an open ledger now. Its writer, if there is one, is shut out.

    When its end cannot be proved, this shows what each bookie knows of it, and how to accept the loss.
    """
    settings = service_settings(SettingSources.of_options(data or None, config, assignments))
    listed = [one.strip() for one in bookies.split(",") if one.strip()]
    async with _ledgers(settings, metadata, data, listed) as client:
        try:
            await client.open(ledger, recover=True)
        except QuorumLost as error:
            survey = await client.survey_end(ledger)
            unproved = _unproved(ledger, survey, error.message)
            if accept_loss is None:
                return unproved
            unproved.print(as_json=as_json)
            await _accept(client, ledger, survey, accept_loss, yes)
        closed = (await client.open(ledger, recover=False)).metadata
    return _closed(ledger, closed)


@contextlib.asynccontextmanager
async def _ledgers(
    settings: ServiceSettings, metadata: str, data: str, bookies: list[str]
) -> AsyncIterator[LedgerClient]:
    """Where the metadata is: on ZooKeeper, or in the data directory of a service that is stopped."""
    from magnetar.ledger import StaticBookies

    from ..wiring.service import Service, system_components

    if not data and not metadata:
        raise InvalidArgument(
            "recover-ledger needs the metadata: --metadata zk://host:port/root of a cluster, or --data DIR of a service "
            "that is stopped"
        )
    # Nobody is meant to connect, and the port may be another service's by now.
    settings = replace(settings, daemon=replace(settings.daemon, bookie_port=0))
    async with (
        contextlib.nullcontext() if data else open_store(metadata) as store,
        Service(settings, system_components(), on_failure=_failed) as service,
    ):
        if store is not None:
            yield await service.operator_ledgers(store)
        elif bookies:
            listed = StaticBookies(parse_bookies(bookies))
            yield service.ledgers(await service.listed_storage(listed, "operator"))
        else:
            storage, _ = await service.own_storage()
            yield service.ledgers(storage)


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


def _failed(error: MagnetarError) -> None:
    fail(error.message)


def _unproved(ledger_id: int, survey: EndSurvey, reason: str) -> Answer:
    """Exit code 1, unless the loss is accepted."""
    record = {
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
    confirmed = survey.last_add_confirmed
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
    shown: list[str | Table] = [
        f"ledger {ledger_id} cannot be closed: {reason}",
        f"last add confirmed, as far as is known: {confirmed if confirmed != NO_ENTRY else 'none'}",
        Table(f"entries behind it, on the last ensemble of ledger {ledger_id}", columns, rows),
    ]
    if survey.undecided:
        shown.append(
            f"nobody who answers has {_text(survey.undecided)}, and nobody can say that they were never confirmed: readers "
            "will find them lost (broker.unreadable_entry_policy=skip passes over them)"
        )
    end = survey.last_entry
    shown.append(
        f"The last entry that is proved is {end if end != NO_ENTRY else '-1 (none)'}. Bring the bookies back that do not "
        "answer; a bookie that was emptied is unknown until its ledgers are repaired. If that cannot be, stop whoever may "
        "still write to the ledger, and accept that whatever followed is lost:\n"
        f"    magnetar cluster recover-ledger {ledger_id} --accept-loss {end}"
    )
    return Answer(record, shown, code=EXIT_FAILED)


def _closed(ledger_id: int, closed: LedgerMetadata) -> Answer:
    end = closed.last_entry
    record = {"ledger": ledger_id, "state": closed.state.name, "last_entry": end, "length": closed.length}
    how = "closed, and empty" if end == NO_ENTRY else f"closed after entry {end}, {closed.length:,} bytes"
    return Answer(record, [f"ledger {ledger_id} is {how}"])


def _text(entries: Any) -> str:
    """`3-7, 9`."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in _ranges(entries))


def _ranges(entries: Iterable[int]) -> list[Range]:
    return list(RangeSet((entry_id, entry_id) for entry_id in entries))
