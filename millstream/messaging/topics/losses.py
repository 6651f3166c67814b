"""What a topic has lost: an operator accepts it, and readers continue."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from millstream.messaging.topics.lookup import streams_of
from millstream.messaging.topics.stream_config import identity_of
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.lost import LostRange, accepted, lost_ranges

__all__ = ["accept_loss"]


async def accept_loss(js: JetStream, name: str, by: str) -> list[tuple[int, LostRange]]:
    """Let readers continue after what was lost; returns what that is now, by partition."""
    at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    taken: list[tuple[int, LostRange]] = []
    for info in await streams_of(js, name):
        waiting = [lost for lost in lost_ranges(info.config) if lost.accepted is None]
        if waiting:
            await js.update_stream(accepted(info.config, at, by))
            number = identity_of(info.config).partition
            taken += [(number, replace(lost, accepted=at, accepted_by=by)) for lost in waiting]
    return taken
