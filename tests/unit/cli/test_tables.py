"""Text of users is shown as it is: nothing interprets it."""

import pytest

from magnetar.cli.terminal.tables import print_table

NAMES = ["[bold]t[/bold]", "a:smile:b", "[/red]", "%s {} {0} \\[b]", "[link=http://x]y"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_no_markup_wherever_it_stands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(f"title {name}", [f"column {name}"], [[f"cell {name}"]])
    out = capsys.readouterr().out
    for place in ("title", "column", "cell"):
        assert f"{place} {name}" in out
