"""The workloads: each is a coroutine that one client process runs against one service, by the public API only.

`WORKLOADS` maps a name to `async def workload(url, topic, **parameters) -> dict`: rates in messages per second, times in ms.
"""
