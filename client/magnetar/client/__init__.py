"""The thin asyncio client; depends on magnetar.proto and magnetar.runtime only."""
