"""`magnetar produce`: a line is a message."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from magnetar.client import MessageId, Producer, ProducerQueueFull, Receipt, connect
from magnetar.proto.errors import InvalidArgument

from .lines import read_lines
from .progress import Watch
from .session import print_json

MAX_UNCONFIRMED_GROUPS = 64


class LineSender:
    """Sends groups of lines in order, with a bounded number of groups unconfirmed."""

    def __init__(self, producer: Producer, key_field: str | None, watch: Watch) -> None:
        self._producer = producer
        self._key_field = key_field
        self._watch = watch
        self._line_number = 0
        self._unconfirmed: deque[list[Receipt]] = deque()
        self.confirmed = 0
        self.last_id: MessageId | None = None

    async def send(self, lines: list[bytes]) -> None:
        """Returns when the lines are on their way; waits for older ones when too many are not confirmed."""
        receipts: list[Receipt] = []
        for line in lines:
            self._line_number += 1
            key = None if self._key_field is None else self._key(line)
            while True:
                try:
                    receipts.append(self._producer.send_nowait(line, key=key))
                    break
                except ProducerQueueFull:
                    if receipts:
                        self._unconfirmed.append(receipts)
                        receipts = []
                    if not self._unconfirmed:
                        raise
                    await self._confirm_oldest()
        self._unconfirmed.append(receipts)
        while len(self._unconfirmed) > MAX_UNCONFIRMED_GROUPS:
            await self._confirm_oldest()

    async def finish(self) -> None:
        """Waits until everything is confirmed."""
        while self._unconfirmed:
            await self._confirm_oldest()

    async def _confirm_oldest(self) -> None:
        receipts = self._unconfirmed.popleft()
        for receipt in receipts:
            self.last_id = await receipt
        self.confirmed += len(receipts)
        self._watch.advance(len(receipts))

    def _key(self, line: bytes) -> str:
        try:
            value: Any = json.loads(line)[self._key_field]
        except (ValueError, KeyError, TypeError):
            raise InvalidArgument(
                f"line {self._line_number} is no JSON object with a field {self._key_field!r}; leave out --key-field, "
                "or mend the line"
            ) from None
        return value if isinstance(value, str) else json.dumps(value)


async def _texts(texts: list[str]) -> AsyncIterator[list[bytes]]:
    yield [os.fsencode(text) for text in texts]


async def produce(
    url: str, topic: str, *, file: str | None, texts: list[str], key_field: str | None, as_json: bool
) -> None:
    """Sends every line of the file, of the texts or of standard input; prints what was stored."""
    descriptor = sys.stdin.fileno() if file in (None, "-") else _open(file or "")
    source = _texts(texts) if texts else read_lines(descriptor)
    watch = Watch("producing", total=len(texts) or None)
    async with connect(url) as client, client.create_producer(topic) as producer:
        with watch:
            sender = LineSender(producer, key_field, watch)
            try:
                async for lines in source:
                    await sender.send(lines)
            except asyncio.CancelledError:
                await sender.finish()  # Ctrl-C: what was read is stored all the same
                raise
            await sender.finish()
    if as_json:
        print_json(
            {"topic": topic, "messages": sender.confirmed, "last_id": sender.last_id and str(sender.last_id)}
        )
    else:
        last = f" (last id {sender.last_id})" if sender.last_id else ""
        print(f"stored {sender.confirmed:,} message{'' if sender.confirmed == 1 else 's'} in {topic}{last}")


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from None
