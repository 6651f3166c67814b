"""Note in a stream's metadata that values of a table are removed by hand; see forgotten.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.messaging.topics.forgotten import begun, keeps_history, loses_values
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import StreamInfo

__all__ = ["Forgetting", "update_noted"]


async def update_noted(
    js: JetStream, before: Mapping[str, Any], after: Mapping[str, Any]
) -> StreamInfo:
    """Change the configuration of a stream, with a note if it may remove values of a table."""
    if not loses_values(before, after):
        return await js.update_stream(after)
    changed = await js.update_stream(begun(after))
    # If this process ends here, all of the past is in doubt until values are removed again.
    return await js.update_stream(begun(changed.config, changed.ts))


class Forgetting:
    """Notes what is removed by hand within its block: `async with Forgetting(js, stream, config)`.

    A stream that is no table gets no note.
    """

    def __init__(self, js: JetStream, stream: str, config: Mapping[str, Any]) -> None:
        self._js = js
        self._stream = stream
        self._noted = keeps_history(config)

    async def __aenter__(self) -> None:
        if self._noted:
            info = await self._js.stream_info(self._stream)
            await self._js.update_stream(begun(info.config))

    async def __aexit__(self, *failure: object) -> None:
        if self._noted and failure[0] is None:
            info = await self._js.stream_info(self._stream)
            await self._js.update_stream(begun(info.config, info.ts))
