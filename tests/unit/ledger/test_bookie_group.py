"""Ledgers that are confined to the bookies of a group, or prefer them: when made, replaced, repaired."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from magnetar.ledger import BookieFacts, LedgerClient, LedgerSettings, LocalTransport, StaticBookies
from magnetar.ledger.core.events import BookiesChosen, ChooseBookies, NoBookies
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.placement.chooser import BOOKIE_GROUP_PROPERTY
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import BookieUnavailable, InvalidArgument, NotEnoughBookies
from magnetar.proto.policies import PlacementGroup
from support.bookies import Bookies, Confirmations

GROUPS = {"f1": "fast", "f2": "fast", "f3": "fast", "s1": "", "s2": "slow", "s3": ""}


class Party:
    """Six bookies, three of them fast."""

    def __init__(self, **settings: object) -> None:
        self.bookies = Bookies(*GROUPS)
        self.directory = StaticBookies(dict.fromkeys(self.bookies, ("127.0.0.1", 1)))
        self.directory.on_suspected = lambda _: None
        for name, group in GROUPS.items():
            self.directory.answered(name, BookieFacts.of({"group": group}))
        self.client = LedgerClient(
            StoredLedgers(self.bookies.metadata),
            LocalTransport(self.bookies),
            self.directory,
            LedgerSettings(2, 2, 2, **settings),  # type: ignore[arg-type]
            random.Random(1),
            self.bookies.clock,
        )


def fast(names: tuple[str, ...]) -> int:
    return sum(name.startswith("f") for name in names)


async def test_what_a_writer_writes_to_breaks_no_placement_nor_does_what_is_empty() -> None:
    chooser = Party().client.components.chooser
    properties = {BOOKIE_GROUP_PROPERTY: "fast"}
    written = LedgerMetadata.create(Striping(2, 2, 2), ("s1", "s2"), 0, properties)
    assert not chooser.breaks_placement(written)
    assert not chooser.breaks_placement(written.close(-1, 0))
    assert chooser.breaks_placement(written.close(0, 1))
    assert chooser.breaks_placement(written.with_ensemble(1, ("f1", "f2")))


async def test_a_strict_group_has_all_of_its_ledgers_and_their_replacements() -> None:
    party = Party()
    writer = await party.client.create(bookie_group="fast")
    for _ in range(20):
        another = await party.client.create(bookie_group="fast")
        assert fast(another.metadata.last_ensemble.bookies) == 2
    heard = Confirmations()
    party.bookies[writer.metadata.last_ensemble.bookies[0]].fail(BookieUnavailable("down"))
    writer.append(b"entry", heard)
    await heard.count(1)
    assert heard.errors == []
    assert fast(writer.metadata.last_ensemble.bookies) == 2, "the third one took its place"
    party.bookies[writer.metadata.last_ensemble.bookies[0]].fail(BookieUnavailable("down"))
    writer.append(b"another", heard)
    await heard.count(2)
    assert heard.errors == [NotEnoughBookies], "three others would have been there"
    with pytest.raises(
        NotEnoughBookies, match=r"bookie_group=fast allows only bookies with .*group=fast: start such"
    ):
        await party.client.create(bookie_group="fast")
    with pytest.raises(NotEnoughBookies, match=r"bookie_group=golden allows only"):
        await party.client.create(bookie_group="golden")
    with pytest.raises(
        NotEnoughBookies, match=r"minimum_write_quorum=1; start more; bookie_group=golden allows"
    ):
        await party.client.create(bookie_group="golden", minimum_write_quorum=1)
    smaller = await party.client.create(bookie_group="fast", minimum_write_quorum=1)
    assert smaller.degraded
    assert fast(smaller.metadata.last_ensemble.bookies) == 1
    assert not smaller.replaceable, "by the bookies of the group, not by all of them"
    await party.client.close()


async def test_a_preferred_group_comes_first_and_others_do_as_well() -> None:
    party = Party()
    for _ in range(20):
        writer = await party.client.create(bookie_group="preferred:fast")
        assert fast(writer.metadata.last_ensemble.bookies) == 2
    four = await party.client.create(ensemble_size=4, bookie_group="preferred:fast")
    assert len(four.metadata.last_ensemble.bookies) == 4
    for name in ("f1", "f2"):
        party.directory.lost(name)
    writer = await party.client.create(bookie_group="preferred:fast")
    assert not writer.degraded
    await party.client.close()


async def test_without_a_group_any_bookie_is_used() -> None:
    party = Party()
    used = {name for _ in range(40) for name in (await party.client.create()).metadata.last_ensemble.bookies}
    assert used == set(GROUPS)
    await party.client.close()


@pytest.mark.parametrize("placement", ["random", "zone"])
async def test_repair_replaces_within_the_group_and_brings_preferred_ledgers_home(placement: str) -> None:
    party = Party(placement=placement)
    writer = await party.client.create(bookie_group="fast")
    ensemble = writer.metadata.last_ensemble.bookies
    chooser, ask = party.client.components.chooser, ChooseBookies((0,), ensemble, writer.metadata)
    (left,) = {"f1", "f2", "f3"} - set(ensemble)
    assert chooser.replacements(ask) == BookiesChosen({0: left})
    party.directory.lost(left)
    assert isinstance(chooser.replacements(ask), NoBookies)
    party.directory.answered(left, BookieFacts.of({"group": "fast"}))
    preferring = replace(writer.metadata, properties={BOOKIE_GROUP_PROPERTY: "preferred:fast"})
    moved = chooser.compliant_replacements(preferring, ("s1", "f1"), ("s1", "f1"))
    assert list(moved) == [0]
    assert moved[0] in ("f2", "f3")
    assert chooser.compliant_replacements(preferring, ("f2", "f1"), ("f2", "f1")) == {}
    await party.client.close()


async def test_what_degrades_in_a_group_is_counted_once_for_all() -> None:
    party = Party()
    party.directory.lost("f1")
    party.directory.lost("f2")
    await party.client.create(bookie_group="fast", minimum_write_quorum=1)
    assert party.client.figures()["degraded_ledgers_total"] == 1
    await party.client.close()


@pytest.mark.parametrize("text", ["two words", "a/b", "preferred:", "strict:a", "ü", "x" * 256])
def test_names_that_cannot_be(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"bookie_group is .*; want the group that bookies have"):
        PlacementGroup.parse(text)
