"""How a command ends."""

from __future__ import annotations

import logging

import pytest

from magnetar.cli.session import run
from magnetar.proto.errors import SendTimeout


def test_one_line_for_one_failure(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def command() -> None:
        logging.getLogger("magnetar.client").warning("1 messages to t failed")
        raise SendTimeout("the message could not be sent")

    with pytest.raises(SystemExit) as ended:
        run(command())
    assert ended.value.code == 1
    assert capsys.readouterr().err == "magnetar: the message could not be sent\n"
    assert not caplog.records
    logging.getLogger("magnetar.client").setLevel(logging.NOTSET)
