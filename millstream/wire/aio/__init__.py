"""The asyncio client: one connection for one event loop."""
