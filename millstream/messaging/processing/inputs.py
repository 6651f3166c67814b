"""What both kinds of processes do with their input: read it, check it, give up on an event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from millstream.errors import DataLoss, ProcessFailed
from millstream.events.event import Event, Partition, place_of
from millstream.failure_log import FailureLog
from millstream.messaging.dead_letters.store import DeadLetterStore, default_dead_letter_topic
from millstream.messaging.processing.settings import ProcessSettings
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.aio.publisher import StreamPublisher
from millstream.wire.interest import needs_hold
from millstream.wire.message import RawMessage, stored_ns_of

__all__ = ["Failures", "Messages", "check_input", "check_retention", "groups"]

_log = logging.getLogger("millstream.messaging")

Messages = AsyncGenerator[tuple[Partition, list[RawMessage]], None]


async def check_retention(jetstream: JetStream, stream: str, name: str) -> None:
    """Refuse an input without positions before anything is claimed."""
    needs_hold((await jetstream.stream_info(stream)).config, f"process '{name}'")


async def check_input(
    jetstream: JetStream, stream: str, name: str, seen: tuple[int, str], start: int
) -> None:
    """The input must still be what was read: `seen` is the offset and time of its last message."""
    offset, stored = seen
    if not offset:
        return
    state = (await jetstream.stream_info(stream)).state
    found = await jetstream.get_message(stream, {"seq": offset})
    same = found is None or stored in ("", str(stored_ns_of(found.time)))
    if state.last_seq < offset or not same:
        raise DataLoss(
            f"process '{name}' has handled '{stream}' up to offset {offset}, but what is stored "
            f"there is not what it read (last offset {state.last_seq}): it was damaged, recreated "
            f"or restored. Use another name to process it from the beginning"
        )
    if state.first_seq > start:
        _log.warning(
            "process %s: offsets %d to %d of %s were removed before they were handled",
            *(name, start, state.first_seq - 1, stream),
        )


async def groups(
    messages: Messages, stopping: asyncio.Event, every: float
) -> AsyncGenerator[tuple[Partition, list[RawMessage]] | None, None]:
    """Groups of messages as they arrive; None after `every` seconds without one, or to stop."""
    pending: asyncio.Task[tuple[Partition, list[RawMessage]] | None] | None = None
    stop = asyncio.create_task(stopping.wait())
    try:
        while True:
            pending = pending or asyncio.create_task(_next(messages))
            await asyncio.wait({pending, stop}, timeout=every, return_when=asyncio.FIRST_COMPLETED)
            if not pending.done():
                yield None
                continue
            found, pending = pending.result(), None
            if found is None:
                return
            yield found
    finally:
        stop.cancel()
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await messages.aclose()


async def _next(messages: Messages) -> tuple[Partition, list[RawMessage]] | None:
    return await anext(messages, None)


class Failures:
    """What becomes of an event that fails."""

    def __init__(
        self, jetstream: JetStream, publisher: StreamPublisher, settings: ProcessSettings
    ) -> None:
        self._jetstream = jetstream
        self._publisher = publisher
        self._settings = settings
        self._lines = FailureLog(_log)

    async def failed(self, event: Event, error: Exception) -> None:
        """Stop at an event, or dead-letter it and continue."""
        name = self._settings.name
        if self._settings.on_error == "stop":
            raise ProcessFailed(name, place_of(event), error) from error
        topic = default_dead_letter_topic(event.topic, name)
        self._lines.warn(
            error,
            "process '%s': the function failed on %s, attempt 1; it becomes a dead letter in '%s'",
            *(name, place_of(event), topic),
        )
        store = DeadLetterStore(self._jetstream, self._publisher, topic, name)
        await store.store(event, f"{type(error).__name__}: {error}", 1)
