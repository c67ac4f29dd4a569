"""A probe's server lives as long as its standard input."""

import asyncio


async def until_hung_up() -> None:
    """Returns when whoever started this process is done with it, or gone."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(0, ended.set)
    await ended.wait()
    loop.remove_reader(0)
