"""Modules that are imported when they are first needed."""

from __future__ import annotations

import asyncio
import importlib
from concurrent.futures import ThreadPoolExecutor


async def import_in_thread(*names: str) -> None:
    """Imports modules in a thread that ends afterwards: in the loop, an import of 100 ms would delay everybody."""
    with ThreadPoolExecutor(1, "import") as executor:
        loop = asyncio.get_running_loop()
        for name in names:
            await loop.run_in_executor(executor, importlib.import_module, name)
